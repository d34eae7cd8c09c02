"""torchrun with an agent on each of two hosts: the same script, and training that survives a killed worker."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from train_and_resume import train

import unisono as un
from unisono.testing.namespaced_ranks import Network

SCRIPT = Path(__file__).with_name("train_and_resume.py")
WITHIN_S = 100
_ports = itertools.count(29700)
Way = Callable[[Network, int, int], list[str]]


def numbered(network: Network, host: int, port: int) -> list[str]:
    """Hosts that know their numbers, and the first one's address."""
    return ["--node-rank", str(host), "--master-addr", network.addresses[0], "--master-port", str(port)]


def met(network: Network, host: int, port: int) -> list[str]:
    """Hosts that find each other, whose agents count restarts each for itself."""
    where = ["--rdzv-endpoint", f"{network.addresses[0]}:{port}", "--local-addr", network.addresses[host]]
    return ["--rdzv-backend", "c10d", *where, "--rdzv-id", f"job{port}", "--rdzv-conf", f"is_host={int(host == 0)}"]


def torchrun(network: Network, way: Way, per_host: int, folder: Path, *arguments: str) -> list[str]:
    """Return the output of the two agents after both have succeeded."""
    port = next(_ports)
    agents = [
        network.start(
            host,
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_host)),
            *(*way(network, host, port), "--max-restarts", "2", "--monitor-interval", "0.1"),
            *(str(SCRIPT), str(folder), *arguments),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for host in range(2)
    ]
    try:
        said = [agent.communicate(timeout=WITHIN_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
            assert agent.stdout is not None
            agent.stdout.close()
    for agent, text in zip(agents, said, strict=True):
        assert agent.returncode == 0, text
    return said


def undisturbed(size: int, backend: str, hosts: list[list[int]], folder: Path) -> torch.Tensor:
    """The weights that training on one machine ends with, where the order of additions is the same."""
    weights: torch.Tensor = un.launch(train, size, backend, (folder, False), hosts=hosts)[0]
    return weights


@pytest.mark.soak
@pytest.mark.parametrize(("way", "per_host"), [(numbered, 1), (met, 2)])
def test_killed_worker_restarts_and_training_resumes(network: Network, tmp_path: Path, way: Way, per_host: int) -> None:
    (tmp_path / "alone").mkdir()
    hosts = [list(range(per_host)), list(range(per_host, 2 * per_host))]
    backend = "tcp" if per_host == 1 else "shm+tcp"
    said = torchrun(network, way, per_host, tmp_path, "dies")
    expected = undisturbed(2 * per_host, backend, hosts, tmp_path / "alone")
    ends = [torch.load(tmp_path / f"end-{rank}.pt") for rank in range(2 * per_host)]
    for rank, (weights, its_backend, its_hosts, _) in enumerate(ends):
        assert torch.equal(weights, expected), f"rank {rank} ended with other weights"
        assert its_backend == backend
        assert its_hosts == tuple(map(tuple, hosts))
    assert ends[-1][3] == 1, "the last rank was killed, and restarted once"
    # The other ranks name the killed one.
    assert any(f"rank {2 * per_host - 1} was lost" in text for text in said), said
