"""Across two hosts, which are network namespaces: torchrun with an unchanged script, Slurm, and the doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from launcher_helpers import SCRIPT, finish, task

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
        out, err = process.communicate(timeout=100)
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
