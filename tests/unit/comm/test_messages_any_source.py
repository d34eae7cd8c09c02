"""Receives from any rank, beyond what holds of every transport: under all schedules and faults, and where refused."""

from __future__ import annotations

import os
import signal
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pairwise import short

import unisono as un
from unisono.core.group import Group
from unisono.core.transport import Options, Transport
from unisono.errors import PeerLostError
from unisono.testing import Checksummed, Faulty, chaos, pool, run_ranks
from unisono.transports.torch import TorchTransport
from unisono.wrappers.base import Wrapper
from unisono.wrappers.trace import Traced


def taken(comm: un.Communicator, counts: list[int]) -> list[tuple[int, int]]:
    """All is sent before anything is received: the sender, and which of its messages it was."""
    if comm.rank > 0:
        works = [comm.isend(torch.tensor([n]), 0) for n in range(counts[comm.rank - 1])]
        comm.barrier()
        for work in works:
            work.wait()
        comm.barrier()
        return []
    comm.barrier()
    got, t = [], torch.zeros(1, dtype=torch.int64)
    while len(got) < sum(counts):
        source = comm.recv(t)
        got.append((source, int(t)))
    assert comm.iprobe() is None
    # Until then the others stay: a probe tells of ranks that have left.
    comm.barrier()
    return got


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=4), seed=st.integers(0, 1 << 16))
def test_senders_are_served_in_turn_and_in_order(counts: list[int], seed: int) -> None:
    found = un.simulate(taken, len(counts) + 1, (counts,), seed=seed, preempt=0.1).results[0]
    assert found == sorted(((rank + 1, n) for rank, c in enumerate(counts) for n in range(c)), key=lambda it: it[::-1])


def served(comm: un.Communicator) -> list[float]:
    """A server answers each of the others, which ask at their own pace, in the order in which they come."""
    got = torch.zeros(1)
    if comm.rank > 0:
        answers = []
        for n in range(4):
            comm.send(torch.tensor([10.0 * comm.rank + n]), 0, tag=1)
            comm.recv(got, 0)
            answers.append(got.item())
        return answers
    work = comm.irecv(got, tag=1)
    for n in range(4 * (comm.size - 1)):
        work.wait()
        source, answer = work.source_rank(), got + 0.5
        if n + 1 < 4 * (comm.size - 1):
            work = comm.irecv(got, tag=1)
        comm.send(answer, source)
    return []


def test_faults_end_correctly_or_name_a_rank() -> None:
    endings = chaos.check(served, 3, seeds=range(15))
    assert endings["right"] > 3, endings
    assert len(endings) > 1, endings


@short(
    "backend, check",
    product(["thread", "shm", "gloo"], ["auto", "full"]),
    [("thread", "full"), ("shm", "auto"), ("gloo", "full")],
)
def test_receive_any_under_wrappers(backend: str, check: str) -> None:
    def wrap(inner: Transport) -> Transport:
        return Traced(Checksummed(Faulty(inner, seed=1, delay=0.3, delay_s=0.002)), lambda event: None)

    found = run_ranks(served, 3, backend, wrap=wrap, check=check)
    assert found[1:] == [[10.0 * rank + n + 0.5 for n in range(4)] for rank in (1, 2)]


def test_hosts_are_served_in_turn() -> None:
    counts = [3, 1, 2]
    found = run_ranks(taken, 4, "shm+gloo", counts, hosts=((0, 2), (1, 3)))[0]
    for rank, count in enumerate(counts):
        assert [n for source, n in found if source == rank + 1] == list(range(count)), found


# -- the end of the only sender ----------------------------------------------------------------------
def outlives(comm: un.Communicator, probes: bool) -> None:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if probes:
        comm.probe(timeout=20)
    comm.recv(torch.zeros(1), timeout=20)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("probes", [False, True])
def test_killed_sender_is_named(backend: str, probes: bool) -> None:
    other, _ = run_ranks(outlives, 2, backend, probes, on_failure="continue")
    assert isinstance(other, PeerLostError)
    assert other.peer == 1


# -- where it is not offered ---------------------------------------------------------------------
class Deaf(Wrapper):
    """Cannot tell which ranks have sent, as NCCL."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.any_source = False

    def wrap_child(self, inner: Transport) -> Deaf:
        return Deaf(inner)


def refused(comm: un.Communicator) -> list[float]:
    got = torch.zeros(1)
    for call in (comm.recv, comm.irecv, lambda _: comm.probe(), lambda _: comm.iprobe(1 - comm.rank)):
        with pytest.raises(ValueError, match="cannot receive from any source: pass the sender's rank, as in recv"):
            call(got)
    comm.sendrecv(torch.ones(1), 1 - comm.rank, got, 1 - comm.rank)
    return got.tolist()


def test_unsupported_backend_raises_and_stays_usable() -> None:
    assert run_ranks(refused, 2, wrap=Deaf) == [[1.0], [1.0]]


def test_nccl_does_not_support_any_source() -> None:
    nothing: Any = None
    transport = TorchTransport(Group.world(0, 2, "declared"), nothing, nothing, Options("nccl"), owned=False)
    assert not transport.any_source


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
@pytest.mark.parametrize("check", ["auto", "full"])
@pytest.mark.parametrize("size", [1, 2])
def test_any_source_finds_messages_of_oneself(backend: str, check: str, size: int) -> None:
    found = pool(backend, 2, check=check).run(finds_itself, size=size)
    assert found == [[rank, rank, rank] for rank in range(size)]


def finds_itself(comm: un.Communicator) -> list[float]:
    assert comm.iprobe(tag=3) is None
    work = comm.isend(torch.tensor([float(comm.rank)]), comm.rank, 3)
    got = torch.full((1,), -1.0)
    found = [comm.probe(tag=3), comm.recv(got, tag=3), got.item()]
    work.wait()
    # A probe of all ranks fails once the others have left.
    comm.barrier()
    return found


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_receive_from_oneself_fails_once_the_others_have_left(backend: str) -> None:
    assert run_ranks(waits_for_itself, 2, backend, timeout=20) == [True, None]


def waits_for_itself(comm: un.Communicator) -> bool | None:
    if comm.rank == 1:
        return None
    with pytest.raises(PeerLostError, match="rank 1"):
        comm.recv(torch.zeros(1))
    return True


# -- what is left behind -------------------------------------------------------------------------
def on_a_group_of_others(comm: un.Communicator, path: str) -> list[int]:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    with un.Communicator.from_group() as made:
        found = [source for source, _ in taken(made, [2, 1])]
        made.barrier()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [*found, int(total)]


def test_owner_of_a_torch_group_keeps_using_it(tmp_path: Any) -> None:
    found = run_ranks(on_a_group_of_others, 3, "shm", str(tmp_path / "store"))
    assert sorted(found[0]) == [1, 1, 2, 3]
    assert found[1:] == [[3], [3]]
