"""Hosts with IPv6 only, two interfaces, the loopback only, or a name that resolves to nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.testing.namespaced_ranks import HostRanks, Network, obstacle

pytestmark = pytest.mark.soak

LONELY = """
import socket
import torch
import unisono as un

def program(comm):
    total = torch.ones(3)
    comm.all_reduce(total)
    return total.tolist()

if __name__ == "__main__":
    try:
        socket.getaddrinfo(socket.gethostname(), 1)
    except OSError:
        print("the name resolves to nothing")
    for backend in ("gloo", "shm", "auto"):
        assert un.launch(program, 2, backend, timeout=60) == [[2.0] * 3] * 2
    with un.init("gloo", init_method="tcp://localhost:29600", rank=0, world_size=1, timeout=60) as comm:
        assert program(comm) == [1.0] * 3
    print("done")
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    with Network(2, ipv6=True) as made:
        yield made


def reduced(comm: un.Communicator) -> tuple[str, float, float]:
    short, long = torch.ones(2), torch.ones(1 << 18)
    comm.all_reduce(short)
    comm.all_reduce(long)
    got = torch.zeros(3)
    comm.sendrecv(torch.full((3,), float(comm.rank)), (comm.rank + 1) % comm.size, got, (comm.rank - 1) % comm.size)
    assert got.tolist() == [float((comm.rank - 1) % comm.size)] * 3
    return comm.backend, short[0].item(), long.sum().item()


@pytest.mark.parametrize(("backend", "found"), [("auto", "shm+tcp"), ("gloo", "gloo")])
def test_hosts_with_ipv6_only(network: Network, backend: str, found: str) -> None:
    with HostRanks(network, (2, 2), reduced, backend=backend) as ranks:
        assert ranks.results() == [(found, 4.0, 4.0 * (1 << 18))] * 4


def test_interface_with_an_ipv6_address_can_be_named(network: Network) -> None:
    with HostRanks(network, (1, 1), reduced, options=lambda rank: {"interface": "eth0"}) as ranks:
        assert ranks.results() == [("tcp", 2.0, 2.0 * (1 << 18))] * 2


def test_data_takes_the_interface_that_is_named(network: Network) -> None:
    def ip(host: int, *words: str) -> None:
        subprocess.run(["ip", "-n", network.name(host), *words], check=True)

    ip(0, "link", "add", "ib0", "type", "veth", "peer", "name", "ib0", "netns", network.name(1))
    for host in range(2):
        ip(host, "address", "add", f"10.78.0.{host + 1}/24", "dev", "ib0")
        ip(host, "link", "set", "ib0", "up")
    before = network.sent(0)
    # The rendezvous is at the address of eth0.
    with HostRanks(network, (1, 1), reduced, options=lambda rank: {"interface": "ib0"}) as ranks:
        assert ranks.results() == [("tcp", 2.0, 2.0 * (1 << 18))] * 2
    assert network.sent(0) - before < (1 << 18) * 4 // 2
    counter = network.command(0, "cat", "/sys/class/net/ib0/statistics/tx_bytes")
    assert int(subprocess.run(counter, check=True, capture_output=True).stdout) >= (1 << 18) * 4 // 2


def test_host_with_loopback_only_and_a_name_that_resolves_to_nothing(tmp_path: Path) -> None:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    script = tmp_path / "lonely.py"
    script.write_text(LONELY)
    setup = 'hostname no-such-name && ip link set lo up && exec "$@"'
    command = ["unshare", "--net", "--uts", "sh", "-c", setup, "sh", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["the name resolves to nothing", "done", ""]
