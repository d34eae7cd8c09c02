"""Templates of Kubernetes, SkyPilot and Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launcher_helpers import finish
from template_helpers import TRAIN, env, heard, program

from unisono.tools.cli.commands.template import templates

Start = Callable[..., "subprocess.Popen[str]"]


# -- Kubernetes ------------------------------------------------------------------------------------
def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(templates()[name].read_text()))


def pod_environment(container: dict[str, Any], index: int) -> dict[str, str]:
    """Environment of a pod, as the kubelet fills it in."""
    variables = {}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            variables[entry["name"]] = str(index)
        elif "secretKeyRef" in source:
            assert source["secretKeyRef"] == {"name": "unisono", "key": "secret"}
            variables[entry["name"]] = "of the cluster"
        else:
            assert isinstance(entry["value"], str), "Kubernetes refuses numbers as values"
            variables[entry["name"]] = entry["value"]
    return variables


def pod() -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The pod's description, that of its only container, and the names that the cluster gives its pods."""
    service, job = documents("kubernetes")
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["subdomain"] == service["metadata"]["name"]
    indices = range(job["spec"]["completions"])
    return spec, container, [f"{job['metadata']['name']}-{index}.{spec['subdomain']}" for index in indices]


def test_kubernetes_template_is_consistent() -> None:
    service, job = documents("kubernetes")
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec, container, names = pod()
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == len(names) == 2
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    assert mounts["shared-memory"] == "/dev/shm"
    for index in range(2):
        variables = pod_environment(container, index)
        assert (variables["RANK"], variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == (str(index), "2", names[0])
        assert variables["MASTER_PORT"].isdecimal()
        assert variables["UNISONO_SECRET"]


@pytest.mark.soak
def test_kubernetes(start: Start, folder: Path, port: int) -> None:
    _, container, names = pod()
    # The cluster: a look-up of names that knows the first pod, and the mounted program.
    program(folder, "getent", f'#!/bin/sh\n[ "$2" = {names[0]} ]\n')
    shell, option, script = container["command"]
    assert (shell, option) == ("sh", "-c")
    # There is no such name here; what it stands for in the cluster is this host.
    text = script.replace("/program", str(folder)).replace("exec python", "MASTER_ADDR=127.0.0.1 exec python")
    ranks = []
    for index in range(len(names)):
        variables = pod_environment(container, index) | {"MASTER_PORT": str(port)}
        ranks.append(start([shell, option, text], env(folder, **variables)))
    assert heard("".join(finish(rank) for rank in ranks))


# -- SkyPilot --------------------------------------------------------------------------------------
@pytest.mark.soak
def test_skypilot(start: Start, folder: Path) -> None:
    (sky,) = documents("skypilot")
    assert {"num_nodes", "resources", "secrets", "setup", "run", "workdir"} <= sky.keys()
    assert sky["secrets"] == {"UNISONO_SECRET": None}
    machines = "\n".join(f"127.0.0.{1 + node}" for node in range(sky["num_nodes"]))
    given = {
        **{name: str(value) for name, value in sky["envs"].items()},
        "UNISONO_SECRET": "of the cloud",
        "SKYPILOT_NUM_NODES": str(sky["num_nodes"]),
        "SKYPILOT_NODE_IPS": machines,
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "RANKS": "1",
    }
    script = sky["run"]
    nodes = [
        start(["bash", "-ec", script], env(folder, **given, SKYPILOT_NODE_RANK=str(node)), folder)
        for node in range(sky["num_nodes"])
    ]
    assert heard("".join(finish(node) for node in nodes))


# -- Ray -------------------------------------------------------------------------------------------
# As much of Ray as the template uses: an actor is a process that does what it is asked.
RAY = """
import multiprocessing, types
util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
init = lambda: None

def remote(**resources):
    return lambda kind: types.SimpleNamespace(remote=lambda: _Actor(kind))

def _live(kind, pipe):
    actor = kind()
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send((True, getattr(actor, name)(*arguments)))
        except BaseException as error:
            pipe.send((False, error))

class _Actor:
    def __init__(self, kind):
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_live, args=(kind, other), daemon=True)
        self._process.start()
    def __getattr__(self, name):
        def ask(*arguments):
            self._pipe.send((name, arguments))
            return self._pipe
        return types.SimpleNamespace(remote=ask)

def get(one):
    if isinstance(one, list):
        return [get(each) for each in one]
    right, value = one.recv()
    if not right:
        raise value
    return value

def wait(pending):
    from multiprocessing.connection import wait
    ready = wait(pending)[:1]
    return ready, [one for one in pending if one not in ready]

def kill(actor):
    actor._process.kill()
    actor._process.join()
"""


@pytest.mark.soak
def test_ray(start: Start, folder: Path) -> None:
    (folder / "ray.py").write_text(RAY)
    (folder / "on_ray.py").write_text(templates()["ray"].read_text())
    done = start([sys.executable, "on_ray.py", "--lr", "0.1"], env(folder), folder)
    assert heard(finish(done), "--lr", "0.1")


@pytest.mark.soak
def test_ray_failure_ends_all_ranks(start: Start, folder: Path) -> None:
    (folder / "ray.py").write_text(RAY)
    (folder / "on_ray.py").write_text(templates()["ray"].read_text())
    (folder / "train.py").write_text(
        TRAIN + "\nif place.rank == 1:\n    raise KeyError('weights')\nimport signal\nsignal.pause()"
    )
    done = start([sys.executable, "on_ray.py"], env(folder), folder)
    _, err = done.communicate(timeout=60)
    assert done.returncode == 1
    assert "KeyError: 'weights'" in err
