"""The transport of simulated ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from insides import plain_of
from simulated_programs import all_reduce

import unisono as un
from unisono.core.types import Recv, Send
from unisono.errors import AbortedError, PeerLostError
from unisono.transports.sim import Link, SimNetwork


def test_early_buffer_change_is_visible() -> None:
    def program(comm: un.Communicator) -> float:
        t = torch.ones(1)
        if comm.rank == 0:
            work = comm.isend(t, 1)
            time.sleep(1e-6)
            t.fill_(2.0)
            work.wait()
        else:
            comm.recv(t, 0)
        return t.item()

    network = SimNetwork(Link(1.0, 0.0), request_s=0.0)
    assert un.simulate(program, 2, network=network).results[1] == 2.0


def test_abort_with_a_message_in_flight() -> None:
    def program(comm: un.Communicator) -> tuple[bool, float]:
        part, t = comm.dup(), torch.full((1,), float(comm.rank))
        work = part.isend(t, 1) if comm.rank == 0 else part.irecv(t, 0)
        if comm.rank == 0:
            # Both ends are there, and the message is on its way.
            time.sleep(0.5)
            part.abort("enough")
        with pytest.raises(un.CommError, match="enough"):
            work.wait()
        t.fill_(7.0)
        time.sleep(10.0)
        return work.is_completed(), t.item()

    network = SimNetwork(links={(0, 1): Link(1.0, 0.0)})
    assert un.simulate(program, 2, network=network).results == [(True, 7.0)] * 2


def test_abort_while_a_message_arrives() -> None:
    def program(comm: un.Communicator) -> None:
        tensor = torch.zeros(200_000)
        work = comm.isend(tensor, 1) if comm.rank == 0 else comm.irecv(tensor, 0)
        if comm.rank == 0:
            time.sleep(1e-5)
            comm.abort("enough")
        work.wait()

    # With these seeds, the abort interrupts the delivery of the message.
    for seed in (55, 182, 294, 309, 317, 387, 538, 588):
        results = un.simulate(program, 2, seed=seed, preempt=0.7, on_failure="continue").results
        assert all(result is None or isinstance(result, AbortedError) for result in results), (seed, results)


def test_results_equal_threads_bitwise() -> None:
    def program(comm: un.Communicator) -> torch.Tensor:
        t = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
        comm.all_reduce(t, algorithm="ring")
        return t

    found = [un.launch(program, 3, backend) for backend in ("thread", "sim")]
    assert all(torch.equal(t, found[0][0]) for results in found for t in results)


def test_thread_transport_can_be_simulated() -> None:
    runs = [un.simulate(all_reduce, 3, seed=3, backend="thread") for _ in range(2)]
    assert runs[0].results == [12.0] * 3
    assert runs[0].trace == runs[1].trace


def test_batches_of_messages_work() -> None:
    def program(comm: un.Communicator) -> list[float]:
        got, right, left = torch.zeros(2), (comm.rank + 1) % 3, (comm.rank - 1) % 3
        sent = torch.full((2,), float(comm.rank))
        batch = [Recv(got, left), Send(sent, right)]
        for work in comm.batch_isend_irecv(batch):
            work.wait()
        return got.tolist()

    assert un.simulate(program, 3).results == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("later_s", [0.0, 0.5])
@pytest.mark.parametrize("call", ["recv", "send"])
def test_rank_that_leaves_ends_the_waits_for_it_at_once(call: str, later_s: float) -> None:
    def program(comm: un.Communicator) -> float:
        part, got = comm.dup(), torch.zeros(1)
        started = time.monotonic()
        if comm.rank == 1:
            time.sleep(0.25)
            sent = part.isend(torch.ones(1), 0)
            part.close()
            sent.wait()
            return time.monotonic() - started
        first = part.irecv(got, 1)
        time.sleep(later_s)
        with pytest.raises(PeerLostError, match="rank 1 has left"):
            getattr(part, call)(torch.zeros(1), 1, tag=1)
        first.wait()
        return time.monotonic() - started

    waited = un.simulate(program, 2).results
    assert waited == pytest.approx([max(0.25, later_s)] * 2, abs=0.01)


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("backend", ["sim", "thread"])
def test_closed_groups_leak_nothing(backend: str, count: int) -> None:
    before = set(threading.enumerate())

    def program(comm: un.Communicator) -> list[int]:
        for _ in range(count):
            with comm.dup() as part:
                part.barrier()
        comm.barrier()
        queue = plain_of(comm)._queue
        return [len(queue.left), len(queue.broken), len(queue.waiting)]

    for left, broken, waiting in un.simulate(program, 3, backend=backend).results:
        # The last one may not be over yet, and nor is the barrier.
        assert left <= 3
        assert broken == 0
        assert waiting <= 6
    assert set(threading.enumerate()) <= before
