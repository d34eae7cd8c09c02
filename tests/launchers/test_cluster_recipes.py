"""Files of clusters on the pages of docs/recipes: Kubernetes, JobSet, TrainJob, Docker Compose, SkyPilot and Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launcher_helpers import finish
from recipe_helpers import FILES, TRAIN, env, heard, program

Start = Callable[..., "subprocess.Popen[str]"]


# -- Kubernetes ------------------------------------------------------------------------------------
def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(FILES[name]))


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


def pods(name: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The pods' job, their description, and the names that the cluster gives them."""
    *_, manifest = documents(name)
    set_name = manifest["metadata"]["name"]
    if manifest["kind"] == "Job":
        job = manifest["spec"]
        prefix, domain = set_name, job["template"]["spec"]["subdomain"]
    else:
        # Of a JobSet: <name>-<replicated job>-<number of the job>-<number of the pod>.<subdomain, else name>
        (replicated,) = manifest["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        prefix, domain = f"{set_name}-{replicated['name']}-0", set_name
        assert manifest["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == 2
    return job, job["template"]["spec"], [f"{prefix}-{index}.{domain}" for index in range(job["completions"])]


def test_kubernetes_service_names_the_pods() -> None:
    service, job = documents("kubernetes.yaml")
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]


@pytest.mark.parametrize("name", ["kubernetes.yaml", "jobset.yaml"])
def test_kubernetes_manifest_is_consistent(name: str) -> None:
    job, spec, names = pods(name)
    assert (job["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
    (container,) = spec["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    assert mounts["shared-memory"] == "/dev/shm"
    for index in range(2):
        variables = pod_environment(container, index)
        assert (variables["RANK"], variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == (str(index), "2", names[0])
        assert variables["MASTER_PORT"].isdecimal()
        assert variables["UNISONO_SECRET"]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["kubernetes.yaml", "jobset.yaml"])
def test_kubernetes(start: Start, folder: Path, port: int, name: str) -> None:
    _, spec, names = pods(name)
    (container,) = spec["containers"]
    # The cluster: a look-up of names that knows the first pod, and the mounted program.
    program(folder, "getent", f'#!/bin/sh\n[ "$2" = {names[0]} ]\n')
    shell, option, script = container["command"]
    assert (shell, option) == ("sh", "-c")
    # There is no such name here; what it stands for in the cluster is this host.
    text = script.replace("/program", str(folder)).replace("exec python", "MASTER_ADDR=127.0.0.1 exec python")
    ranks = []
    for index in range(len(names)):
        variables = pod_environment(container, index) | {"MASTER_PORT": str(port)}
        ranks.append(start([shell, option, text], env(folder, **variables), folder))
    assert heard("".join(finish(rank) for rank in ranks))


@pytest.mark.soak
def test_trainjob(start: Start, folder: Path, port: int) -> None:
    (job,) = documents("trainjob.yaml")
    trainer = job["spec"]["trainer"]
    # What the Trainer's runtime torch-distributed adds to a pod's environment; the first pod is this host here.
    added = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    nodes = [
        start(
            trainer["command"], env(folder, **pod_environment(trainer, node), **added, PET_NODE_RANK=str(node)), folder
        )
        for node in range(trainer["numNodes"])
    ]
    assert heard("".join(finish(node) for node in nodes), size=4)


def faults_of(manifest: dict[str, Any]) -> str:
    """Return what the published schema of a manifest's kind refuses."""
    if manifest["kind"] in ("JobSet", "TrainJob"):
        # Models made of the schemas drop the fields that these lack.
        from kubeflow_trainer_api import models

        kind = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}[manifest["kind"]]
        known = kind.from_dict(manifest).to_dict()
        return "" if known == manifest else f"{known} is what the schema knows of {manifest}"
    import kubernetes_validate

    try:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return ""


@pytest.mark.soak
@pytest.mark.parametrize("name", ["kubernetes.yaml", "jobset.yaml", "trainjob.yaml"])
def test_kubernetes_manifest_follows_its_published_schema(name: str) -> None:
    for manifest in documents(name):
        assert faults_of(manifest) == ""
        manifest["spec"]["replicaz"] = 1
        assert "replicaz" in faults_of(manifest)


# -- Docker Compose --------------------------------------------------------------------------------
@pytest.mark.soak
def test_compose(start: Start, folder: Path, port: int) -> None:
    (compose,) = documents("compose.yaml")
    hosts = []
    for service in compose["services"].values():
        assert service["init"]
        secret = service["environment"]["UNISONO_SECRET"]
        assert secret.startswith("${UNISONO_SECRET:?")
        variables = {**service["environment"], "UNISONO_SECRET": "of the shell"}
        # The name of the first service is this host here.
        command = service["command"].replace("host0", "127.0.0.1").replace("29400", str(port))
        hosts.append(start(command.split(), env(folder, **variables), folder))
    assert len(hosts) == 2
    assert heard("".join(finish(host) for host in hosts), size=4)


# -- SkyPilot --------------------------------------------------------------------------------------
@pytest.mark.soak
def test_skypilot(start: Start, folder: Path) -> None:
    (sky,) = documents("skypilot.yaml")
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
# As much of Ray as the file uses: an actor is a process that does what it is asked.
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
    (folder / "on_ray.py").write_text(FILES["on_ray.py"])
    done = start([sys.executable, "on_ray.py", "--lr", "0.1"], env(folder), folder)
    assert heard(finish(done), "--lr", "0.1")


@pytest.mark.soak
def test_ray_failure_ends_all_ranks(start: Start, folder: Path) -> None:
    (folder / "ray.py").write_text(RAY)
    (folder / "on_ray.py").write_text(FILES["on_ray.py"])
    (folder / "train.py").write_text(
        TRAIN + "\nif place.rank == 1:\n    raise KeyError('weights')\nimport signal\nsignal.pause()"
    )
    done = start([sys.executable, "on_ray.py"], env(folder), folder)
    _, err = done.communicate(timeout=300)
    assert done.returncode == 1
    assert "KeyError: 'weights'" in err
