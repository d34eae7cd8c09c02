"""Checks for `Work`, the handle of an operation in flight: which state it reports, and when."""

from __future__ import annotations

from functools import partial

import torch

from unisono.communicator import Communicator
from unisono.core.work import wait_any
from unisono.testing.conformance.world import Raised, World, answer, numbers, raised, until, wait_all

__all__ = [
    "collectives_can_be_waited_for_in_any_order",
    "future_completes_without_polling",
    "timed_out_collective_may_be_repeated",
    "timed_out_wait_may_be_repeated",
    "wait_for_one_of_many_works",
    "work_completes_without_polling",
    "work_reports_completion",
    "works_can_be_waited_for_in_any_order",
]


def work_reports_completion(world: World) -> None:
    """`is_completed` is false before the message is sent, and true, without an error, after `wait`."""

    def program(comm: Communicator) -> tuple[bool, bool, Raised] | None:
        if comm.rank == 1:
            answer(comm, 7)
            return None
        work = comm.irecv(numbers(comm, -1), 1)
        before = work.is_completed()
        # Rank 1 sends its message only after it has received this one.
        comm.send(numbers(comm, 1), 1)
        work.wait()
        return before, work.is_completed(), Raised.of(work.exception())

    found = world.run(program)[0]
    assert found == (False, True, Raised()), f"done before, done after, error: {found}"


def timed_out_wait_may_be_repeated(world: World) -> None:
    """A wait that times out raises an error with the rank and the time waited; the message can still arrive."""
    # A timeout of zero is also valid.
    timeouts = (0.0, 0.05)

    def program(comm: Communicator) -> tuple[list[Raised], float] | None:
        if comm.rank == 1:
            answer(comm, 7)
            return None
        got = numbers(comm, -1)
        work = comm.irecv(got, 1)
        errors = [raised(partial(work.wait, timeout)) for timeout in timeouts]
        comm.send(numbers(comm, 1), 1)
        work.wait()
        return errors, got.item()

    errors, got = world.run(program)[0]
    for timeout, error in zip(timeouts, errors, strict=True):
        assert "CommTimeoutError" in error.kinds, str(error)
        assert "rank 1" in error.text, str(error)
        assert error.peer == 1, f"the error names rank {error.peer}"
        assert error.waited_s is not None, str(error)
        assert error.waited_s >= 0.8 * timeout, f"waited {error.waited_s} s of {timeout}"
    assert got == 7, f"the second wait brought {got}"


def timed_out_collective_may_be_repeated(world: World) -> None:
    """An asynchronous collective continues after a wait for it has timed out."""

    def program(comm: Communicator) -> tuple[Raised, float]:
        total = numbers(comm, comm.rank + 1)
        first = Raised()
        if comm.rank == 1:
            # Rank 0 sends this message after its first wait has timed out.
            comm.recv(numbers(comm, 0), 0)
        work = comm.all_reduce(total, async_op=True)
        if comm.rank == 0:
            first = raised(lambda: work.wait(0.05))
            comm.send(numbers(comm, 0), 1)
        work.wait()
        return first, total.item()

    (first, total), (_, other) = world.run(program)
    assert "CommTimeoutError" in first.kinds, str(first)
    assert (first.waited_s or 0.0) >= 0.04, f"waited {first.waited_s} s of 0.05"
    assert (total, other) == (3, 3), f"the second wait brought {total} and {other}"


def work_completes_without_polling(world: World) -> None:
    """`is_completed` becomes true even if nobody waits, once the message has arrived or the collective is complete."""

    def program(comm: Communicator, within_s: float) -> tuple[float, float]:
        got = numbers(comm, -1)
        total = numbers(comm, comm.rank + 1)
        work = comm.isend(numbers(comm, 7), 1) if comm.rank == 0 else comm.irecv(got, 0)
        until(work.is_completed, within_s)
        until(comm.all_reduce(total, async_op=True).is_completed, within_s)
        return got.item(), total.item()

    assert world.run(program, world.soon_s) == [(-1, 3), (7, 3)]


def future_completes_without_polling(world: World) -> None:
    """The work's future completes even if nobody waits, once the message has arrived or the collective is complete."""

    def program(comm: Communicator, within_s: float) -> tuple[float, float]:
        got = numbers(comm, -1)
        total = numbers(comm, comm.rank + 1)
        work = comm.isend(numbers(comm, 7), 1) if comm.rank == 0 else comm.irecv(got, 0)
        seen = work.get_future().then(lambda future: (future.value(), got.item())[1])
        summed = comm.all_reduce(total, async_op=True).get_future().then(lambda _: total.item())
        return _value(seen, within_s), _value(summed, within_s)

    assert world.run(program, world.soon_s) == [(-1, 3), (7, 3)]


def works_can_be_waited_for_in_any_order(world: World) -> None:
    """A rank may call `wait()` repeatedly, or on a `Work` that is known to be complete."""

    def program(comm: Communicator) -> list[float]:
        got = numbers(comm, *[-1] * 5)
        if comm.rank == 0:
            works = [comm.isend(numbers(comm, n), 1) for n in range(5)]
        else:
            works = [comm.irecv(got[n], 0) for n in range(5)]
        wait_all((*reversed(works), *works))
        return got.tolist()

    assert world.run(program)[1] == [0, 1, 2, 3, 4]


def wait_for_one_of_many_works(world: World) -> None:
    """`wait_any` returns the index of a completed operation, even if that is not the first in the list."""

    def program(comm: Communicator, within_s: float) -> int | None:
        if comm.rank > 0:
            answer(comm, comm.rank)
            return None
        got = numbers(comm, -1, -1)
        works = [comm.irecv(got[n], n + 1) for n in range(2)]
        comm.send(numbers(comm, 0), 2)
        first = wait_any(works, within_s)
        comm.send(numbers(comm, 0), 1)
        wait_all(works)
        return first

    assert world.run(program, world.soon_s, size=3)[0] == 1


def collectives_can_be_waited_for_in_any_order(world: World) -> None:
    """Blocking and asynchronous collectives run in call order, regardless of the order of waits."""

    def program(comm: Communicator) -> list[list[float]]:
        tensors = [torch.full((1000,), float(comm.rank + n), device=comm.device) for n in range(6)]
        works = [comm.all_reduce(t, algorithm="ring", async_op=True) for t in tensors[:4]]
        comm.all_reduce(tensors[4])
        works.append(comm.all_reduce(tensors[5], async_op=True))
        wait_all(reversed(works))
        return [t.unique().tolist() for t in tensors]

    for found in world.run(program, size=3):
        assert found == [[3.0 * n + 3] for n in range(6)], found


def _value(future: torch.futures.Future[float], within_s: float) -> float:
    until(future.done, within_s)
    return future.value()
