"""`init("auto")` on two hosts with addresses of their own: what comes of it, what crosses the line, and what fails."""

from __future__ import annotations

import time
import zlib
from typing import Any

import pytest
import torch

import unisono as un
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.testing.namespaced_ranks import HostRanks, Network, send_signal

MIB = 1 << 20
SOON_S = 5.0


def bits(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.numpy())


def tour(comm: un.Communicator) -> dict[str, Any]:
    """A little of everything; each value is the same on all ranks, or is compared with what it must be."""
    rank, size = comm.rank, comm.size
    found: dict[str, Any] = {"backend": comm.backend, "hosts": comm.hosts, "overlaps": comm.overlaps}
    short, long = torch.rand(1000) + rank, torch.rand(MIB) + rank
    everything = [torch.empty_like(long) for _ in range(size)]
    comm.all_gather(everything, long)
    comm.all_reduce(short)
    comm.all_reduce(long)
    found["sum is right"] = torch.allclose(long, torch.stack(everything).sum(0), rtol=1e-5)
    found["bits"] = (bits(short), bits(long))
    comm.broadcast(long, src=size - 1)
    found["from the last"] = bits(long)
    half = comm.split(comm.rank % 2)
    total = torch.tensor([float(rank)])
    half.all_reduce(total)
    found["half"] = (half.backend, half.hosts, total.item())
    mine = comm.split(0 if rank < 2 else 1)
    mine.all_reduce(total)
    found["host"] = (mine.hosts, total.item())
    got = torch.zeros(3 * MIB)
    comm.sendrecv(torch.full_like(got, float(rank)), (rank + 1) % size, got, (rank - 1) % size)
    found["behind"] = got.unique().tolist() == [(rank - 1) % size]
    comm.barrier()
    return found


def test_auto_selects_shm_within_and_tcp_between_hosts(network: Network) -> None:
    with HostRanks(network, (2, 2), tour) as ranks:
        found = ranks.results()
    for rank, its in enumerate(found):
        assert isinstance(its, dict), its
        assert its["backend"] == "shm+tcp"
        assert its["hosts"] == ((0, 1), (2, 3))
        assert its["sum is right"], rank
        assert its["bits"] == found[0]["bits"]
        assert its["from the last"] == found[0]["from the last"]
        assert its["behind"], rank
    assert found[0]["half"] == ("shm+tcp", ((0,), (1,)), 2.0)
    assert [its["host"] for its in found] == [(((0, 1),), 6.0)] * 4


def summed_again_and_again(comm: un.Communicator, count: int, times: int, timeout: float | None = None) -> int:
    total = torch.ones(count)
    for number in range(times):
        comm.all_reduce(total, "max", timeout=timeout)
        if number == 3:
            send_signal()
    return times


def test_killed_rank_is_reported_to_all_others(network: Network) -> None:
    for killed, count in ((3, 1000), (0, MIB)):
        with HostRanks(network, (2, 2), summed_again_and_again, count, 10**9) as ranks:
            ranks.wait_for_word()
            ranks.kill(killed)
            started = time.monotonic()
            found = ranks.results()
        assert time.monotonic() - started < SOON_S, "the others were told late"
        for rank, its in enumerate(found):
            if rank != killed:
                assert isinstance(its, PeerLostError), f"rank {rank} of which {killed} was killed: {its!r}"
                assert f"rank {killed} " in str(its), its


def test_lost_host_is_reported(network: Network) -> None:
    with HostRanks(network, (2, 2), summed_again_and_again, MIB, 10**9) as ranks:
        ranks.wait_for_word()
        ranks.kill(2, 3)
        found = ranks.results()
    for its in found[:2]:
        assert isinstance(its, PeerLostError), repr(its)
        assert its.peer in (2, 3)
        assert f"rank {its.peer} was lost" in str(its)


def cut(network: Network, watched: range) -> list[Any]:
    """Return the errors of the observed ranks, of ranks 0 to 3, after the link between the hosts is cut."""
    with HostRanks(network, (2, 2), summed_again_and_again, 1000, 10**9, 1.0) as ranks:
        ranks.wait_for_word()
        network.cut(1)
        return ranks.results(30.0, watched)


def test_cut_link_times_out_and_names_ranks(network: Network) -> None:
    for its in cut(network, range(2)):
        assert isinstance(its, CommTimeoutError), repr(its)
        assert "for rank 2 (and 3), which have not arrived" in str(its), its


@pytest.mark.soak
def test_rank_without_control_plane_names_what_is_out_of_reach(network: Network) -> None:
    """A rank that waits for another on its own host cannot know which rank of the other host is missing."""
    for its in cut(network, range(2, 4)):
        assert isinstance(its, CommTimeoutError), repr(its)
        assert its.peer in {0, 1, None}
        assert "ost 10.77.0.1 not reachable since" in str(its), its
        named = "rank on another host" if its.peer is None else f"rank {its.peer}, which has not arrived"
        assert named in str(its), its


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_unreachable_address_is_explained(network: Network, backend: str) -> None:
    with HostRanks(network, (2, 1), summed_again_and_again, 1, 1, backend=backend, options=by_the_loopback) as ranks:
        found = ranks.results()
    for its in found:
        assert isinstance(its, CommError), repr(its)
        said = str(its)
        assert "rank 2 (at 10.77.0.2 on eth0) cannot reach rank 0 at 127.0.0.1:" in said, said
        assert "UNISONO_INTERFACE" in said
        assert "loopback" in said


def by_the_loopback(rank: int) -> dict[str, Any]:
    """The host of rank 0 names an address that is of no use to the other one."""
    return {"interface": "lo"} if rank < 2 else {}


def test_unknown_interface_lists_the_known_ones(network: Network) -> None:
    with HostRanks(network, (1, 1), summed_again_and_again, 1, 1, options=lambda rank: {"interface": "ib7"}) as ranks:
        found = ranks.results()
    for its in found:
        assert isinstance(its, ValueError), repr(its)
        assert "'ib7', which interface= names; it has lo, eth0" in str(its)
