"""Connections of a long link send at the rate that the kernel measures, whatever its default is."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.testing.namespaced_ranks import HostRanks, Network, obstacle

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def congestion_controls(comm: un.Communicator) -> set[str]:
    """Return the algorithms of the connections between the hosts, as the kernel names them."""
    # In one slice, or in several, as the link is.
    for count in (1, 100_000, 3_000_001):
        total = torch.full((count,), comm.rank + 1.0)
        comm.all_reduce(total)
        assert torch.equal(total, torch.full((count,), 3.0))
    told = subprocess.run(["ss", "-tinH", "state", "established"], capture_output=True, text=True, check=True).stdout
    comm.barrier()
    lines = told.splitlines()
    between = [line for line in lines if "10.77.0.1:" in line and "10.77.0.2:" in line]
    return {words.split()[0] for line, words in pairwise(lines) if line in between}


@pytest.mark.parametrize(("delay", "wanted"), [("10ms", "bbr"), pytest.param("0ms", "reno", marks=pytest.mark.soak)])
def test_a_long_link_gets_bbr(delay: str, wanted: str) -> None:
    slow = delay != "0ms"
    if (reason := obstacle(slow=slow)) is not None:
        pytest.skip(reason)
    if not {"bbr", "reno"} <= set(ALLOWED.read_text().split()):
        pytest.skip("this kernel does not allow both bbr and reno")
    with Network(2, delay=delay) as network:
        for host in range(2):
            default = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
            subprocess.run(network.command(host, "sh", "-c", default), check=True)
        with HostRanks(network, (1, 1), congestion_controls, backend="tcp") as ranks:
            assert ranks.results() == [{wanted}, {wanted}]
