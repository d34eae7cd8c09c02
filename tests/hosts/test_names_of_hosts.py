"""Hosts whose names stand for other addresses elsewhere, and addresses that mean something on one link only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.testing.namespaced_ranks import Network, obstacle

pytestmark = pytest.mark.soak

PORT = 29700
WITHIN_S = 150.0
RANK = """
import sys, torch, unisono as un
backend, url, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
given = {"init_method": url, "rank": rank, "world_size": size} if url else {}
if backend == "torch":
    import torch.distributed as dist
    import unisono.interop
    dist.init_process_group("unisono", **given)
    total = torch.ones(1 << 12)
    dist.all_reduce(total)
    dist.destroy_process_group()
else:
    with un.init(backend, timeout=60, **given) as comm:
        total = torch.ones(1 << 12)
        comm.all_reduce(total)
print(total[-1].item())
"""


@pytest.fixture
def network() -> Iterator[Network]:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    with Network(2) as made:
        yield made


def ip(network: Network, host: int, *words: str) -> None:
    subprocess.run(["ip", "-n", network.name(host), *words], check=True)


def meet(network: Network, folder: Path, names: list[str], backend: str, by: str, masters: list[str]) -> list[str]:
    """Return what two ranks on each of two hosts print or, if they fail, their last lines.

    Args:
        network: The hosts.
        folder: For files.
        names: Content of each host's /etc/hosts, which this machine's does not change.
        backend: Of all ranks, or "torch" for a group of torch.distributed.
        by: "env" or "tcp".
        masters: MASTER_ADDR of each host.
    """
    ranks = []
    for rank in range(4):
        host = rank // 2
        known = folder / f"hosts{host}"
        known.write_text(f"127.0.0.1 localhost\n{names[host]}\n")
        place = {"MASTER_ADDR": masters[host], "MASTER_PORT": str(PORT), "RANK": str(rank), "WORLD_SIZE": "4"}
        master = f"[{masters[host]}]" if ":" in masters[host] else masters[host]
        url = f"tcp://{master}:{PORT}" if by == "tcp" else ""
        words = ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(known), sys.executable, "-c", RANK]
        environment = {**os.environ, **(place if by == "env" else {})}
        ranks.append(
            network.start(
                host,
                *words,
                backend,
                url,
                str(rank),
                "4",
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        said = [rank.communicate(timeout=WITHIN_S) for rank in ranks]
    finally:
        for rank in ranks:
            with rank:
                rank.kill()
    return [out.strip() or error.strip().rpartition("\n")[2] for out, error in said]


WAYS = [("auto", "env"), ("auto", "tcp"), ("tcp", "env"), ("gloo", "tcp"), ("torch", "env")]


@pytest.mark.parametrize(("backend", "by"), WAYS)
def test_a_name_that_is_the_loopback_on_its_own_host(network: Network, tmp_path: Path, backend: str, by: str) -> None:
    names = ["127.0.1.1 first", "10.77.0.1 first"]
    assert meet(network, tmp_path, names, backend, by, ["first", "first"]) == ["4.0"] * 4


@pytest.mark.parametrize(("backend", "by"), WAYS)
def test_a_name_of_ipv6_here_and_ipv4_there(network: Network, tmp_path: Path, backend: str, by: str) -> None:
    ip(network, 0, "address", "add", "fd77::1/64", "dev", "eth0", "nodad")
    names = ["fd77::1 first", "10.77.0.1 first"]
    assert meet(network, tmp_path, names, backend, by, ["first", "first"]) == ["4.0"] * 4


@pytest.mark.parametrize(("backend", "by"), WAYS)
def test_a_link_local_address(network: Network, tmp_path: Path, backend: str, by: str) -> None:
    ip(network, 1, "link", "set", "eth0", "down")
    ip(network, 1, "link", "set", "eth0", "name", "ib1")
    ip(network, 1, "link", "set", "ib1", "up")
    for host, interface in enumerate(("eth0", "ib1")):
        ip(network, host, "address", "flush", "dev", interface)
        ip(network, host, "address", "add", f"fe80::{host + 1}/64", "dev", interface, "nodad")
    assert meet(network, tmp_path, ["", ""], backend, by, ["fe80::1%eth0", "fe80::1%ib1"]) == ["4.0"] * 4


@pytest.mark.parametrize("by", ["env", "tcp"])
def test_the_first_address_of_a_name_leads_nowhere(network: Network, tmp_path: Path, by: str) -> None:
    ip(network, 1, "address", "add", "fd77::2/64", "dev", "eth0", "nodad")
    # The neighbour is known, and drops what arrives.
    ip(network, 1, "neighbour", "add", "fd77::9", "lladdr", "02:00:00:00:00:09", "dev", "eth0")
    names = ["10.77.0.1 first", "fd77::9 first\n10.77.0.1 first"]
    assert meet(network, tmp_path, names, "auto", by, ["first", "first"]) == ["4.0"] * 4
