"""Across two hosts, which are network namespaces: torchrun with an unchanged script, Slurm, Ray, and the doctor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from launcher_helpers import SCRIPT, finish, task
from waiting import wait_until

from unisono.bootstrap.slurm import port_of
from unisono.testing.namespaced_ranks import Network, obstacle

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    with Network(2) as made:
        yield made


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(path))


def equal(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.soak
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_script_under_torchrun(start: Start, network: Network, tmp_path: Path, rendezvous: str) -> None:
    alone, apart = tmp_path / "alone.pt", tmp_path / "apart.pt"
    finish(start([sys.executable, SCRIPT, "--launch", "2", "--out", alone]))
    agents = []
    for host, address in enumerate(network.addresses):
        where = {
            "static": ["--node-rank", host, "--master-addr", network.addresses[0], "--master-port", 29400],
            "c10d": [
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{network.addresses[0]}:29401", "--rdzv-id", "job"),
                *("--rdzv-conf", f"is_host={1 - host}", "--local-addr", address),
            ],
        }[rendezvous]
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, *where, SCRIPT]
        agents.append(start(network.command(host, *map(str, words), "--out", str(apart))))
    for agent in agents:
        finish(agent)
    assert equal(alone, apart)


@pytest.mark.soak
def test_script_under_slurm(start: Start, network: Network, tmp_path: Path) -> None:
    """Nodes by their names, one of which its own host gives to its loopback, as many systems do."""
    alone, apart = tmp_path / "alone.pt", tmp_path / "apart.pt"
    finish(start([sys.executable, SCRIPT, "--launch", "2", "--out", alone]))
    tasks = []
    for host in range(2):
        names = [*network.addresses]
        if host == 0:
            names[0] = "127.0.1.1"
        hosts = tmp_path / f"hosts {host}"
        hosts.write_text("".join(f"{address} node{number}\n" for number, address in enumerate(names)))
        lines = f"mount --bind '{hosts}' /etc/hosts; exec \"$@\""
        words = ["unshare", "--mount", "sh", "-ec", lines, "sh", sys.executable, str(SCRIPT), "--out", str(apart)]
        env = task(host, 2, SLURM_STEP_NODELIST="node[0-1]", SLURM_LOCALID="0", UNISONO_SECRET="x")
        tasks.append(start(network.command(host, *words), env))
    for one in tasks:
        finish(one)
    assert equal(alone, apart)
    assert port_of(200505, 0) == 15000 + 200505 % 16384


def examined(start: Start, network: Network, *words: str) -> list[list[dict[str, str]]]:
    command = [sys.executable, "-m", "unisono", "doctor", "between_hosts", "--json", *words]
    command += ["--hosts", ",".join(network.addresses)]
    found = []
    for process in [start(network.command(host, *command)) for host in range(2)]:
        out, err = process.communicate(timeout=300)
        assert f"Run this on each of {network.addresses[0]}" in err
        found.append(json.loads(out)["findings"])
    return found


@pytest.mark.soak
def test_doctor_reduces_between_hosts(start: Start, network: Network) -> None:
    for host, (finding,) in enumerate(examined(start, network)):
        assert finding["text"].startswith(f"this is host {host} of 2; gloo: 2 ranks compute the right sum"), finding


@pytest.mark.soak
def test_doctor_reports_an_unreachable_host(start: Start, network: Network) -> None:
    network.cut(1)
    try:
        first, second = examined(start, network, "--timeout", "18")
    finally:
        network.heal(1)
    assert (first[0]["state"], second[0]["state"]) == ("problem", "problem")
    assert "rank 1, which has not arrived" in first[0]["text"]
    assert "10.77.0.1" in second[0]["text"]
    assert "UNISONO_SECRET" in second[0]["fix"]


ON_RAY = """
import pathlib, sys
import ray, torch
import unisono as un
from unisono.errors import PeerLostError

def add(comm):
    tensor = torch.tensor([comm.rank + 1.0])
    comm.all_reduce(tensor)
    return comm.backend, sorted(map(len, comm.hosts)), tensor.item()

def be_ended(comm, note):
    comm.barrier()
    if comm.rank == 0:
        pathlib.Path(note).touch()
    while True:
        try:
            comm.barrier()
        except PeerLostError as error:
            return f"rank {error.peer} was lost"

if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    engine = un.engines.Ray(strategy="SPREAD")
    assert un.launch(add, 4, on=engine) == [("shm+tcp", [2, 2], 10.0)] * 4
    ends = un.launch(be_ended, 4, on=engine, args=(sys.argv[2],), on_failure="continue")
    lost = {rank for rank, end in enumerate(ends) if isinstance(end, PeerLostError)}
    assert len(lost) == 2, ends
    ranks = f"{min(lost)}, {max(lost)}"
    assert all(f"host 10.77.0.2 was lost, with ranks {ranks} of 4: rank {rank} " in str(ends[rank]) for rank in lost)
    named = {end for rank, end in enumerate(ends) if rank not in lost}
    assert named <= {f"rank {rank} was lost" for rank in lost}, ends
    print("done")
"""


def kill_all(network: Network, host: int) -> None:
    """Kill all processes of a host."""
    listed = subprocess.run(["ip", "netns", "pids", network.name(host)], capture_output=True, text=True, check=True)
    for process in map(int, listed.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ranks_on_ray(start: Start, network: Network, tmp_path: Path) -> None:
    """Two nodes of Ray, one of which dies."""
    pytest.importorskip("ray", reason="runs ranks on Ray")
    (tmp_path / "driver.py").write_text(ON_RAY)
    # Sockets in it have names of at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        off = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "UNISONO_INTERFACE": "eth0"}
        env = {**os.environ, **off, "PYTHONPATH": os.pathsep.join(sys.path)}
        address = f"{network.addresses[0]}:6379"
        roles = [
            ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"],
            [f"--address={address}"],
        ]
        for host, role in enumerate(roles):
            words = ["--block", "--num-cpus=2", "--object-store-memory=100000000"]
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, *words]
            start(network.command(host, *command, f"--node-ip-address={network.addresses[host]}"), env)
        note = tmp_path / "note"
        driver = start(network.command(0, sys.executable, str(tmp_path / "driver.py"), address, str(note)), env)
        assert wait_until(lambda: note.exists() or driver.poll() is not None, 300.0)
        kill_all(network, 1)
        out, err = driver.communicate(timeout=200)
        # Ray prints there too.
        assert "done" in out.splitlines(), err
        kill_all(network, 0)
