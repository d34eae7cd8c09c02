"""Failure checks: every wait ends, on every rank, with an error that names the failed rank and the cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch

from unisono.communicator import Communicator
from unisono.errors import AbortedError, ClosedError, CommTimeoutError, PeerLostError
from unisono.testing.conformance.world import NOTHING, Raised, World, check_loss, error_of, numbers, raised, together

__all__ = [
    "abort_ends_every_wait",
    "closed_communicator_rejects_calls",
    "failed_rank_is_reported_in_subgroups",
    "failed_rank_is_reported_to_the_others",
    "first_cause_is_kept",
    "late_rank_is_named",
]


def abort_ends_every_wait(world: World) -> None:
    """Ranks in any kind of wait promptly get an `AbortedError` with the reason."""

    def program(comm: Communicator, soon_s: float, never_s: float) -> tuple[str, str]:
        part = comm.dup()
        # Every rank except rank 3, which aborts, starts an operation before the abort.
        works = {
            0: lambda: part.irecv(numbers(comm, 0), 3),
            1: lambda: part.barrier(async_op=True),
            2: lambda: part.isend(torch.zeros(1 << 20, device=comm.device), 3),
        }
        work = works[part.rank]() if part.rank in works else None
        comm.barrier()
        started = time.monotonic()
        if work is None:
            part.abort("enough")
        message = "enough" if work is None else error_of(lambda: work.wait(never_s), AbortedError)
        assert time.monotonic() - started < soon_s, "the wait went on after the abort"
        later = error_of(part.barrier, AbortedError)
        together(comm)
        return message, later

    for rank, (message, later) in enumerate(world.run(program, world.soon_s, world.never_s, size=4)):
        # Rank 2's send may already have completed, if it was buffered.
        assert "enough" in message or (rank == 2 and message == NOTHING), f"rank {rank}: {message}"
        assert "enough" in later, f"rank {rank}: {later}"


def closed_communicator_rejects_calls(world: World) -> None:
    """Every call on a closed communicator raises `ClosedError`; `close` is idempotent."""

    def program(comm: Communicator) -> list[str]:
        part = comm.dup()
        together(part)
        part.close()
        part.close()
        calls: list[Callable[[], object]] = [
            part.barrier,
            lambda: part.send(numbers(comm, 0), 1 - part.rank),
            lambda: part.irecv(numbers(comm, 0), 1 - part.rank),
            lambda: part.split(0),
        ]
        return [error_of(call, ClosedError) for call in calls]

    for message in world.run(program):
        assert all("closed" in sentence for sentence in message), message


def failed_rank_is_reported_to_the_others(world: World) -> None:
    """A rank that fails with its own error is the `peer` of a `PeerLostError` on every rank that waits for it."""
    never_s = world.never_s
    check_loss(world, lambda comm: comm.all_reduce(numbers(comm, 1), timeout=never_s))
    check_loss(world, lambda comm: comm.recv(numbers(comm, 0), 1, timeout=never_s))


def failed_rank_is_reported_in_subgroups(world: World) -> None:
    """In a sub-group, waits for a failed rank raise a `PeerLostError`, which the work and its future report."""

    def program(comm: Communicator, never_s: float) -> list[Raised]:
        part = comm.dup()
        if comm.rank == 1:
            comm.barrier()
            raise KeyError("my own mistake")
        work = part.irecv(numbers(comm, 0), 1)
        future = work.get_future()
        # Rank 1 fails after this barrier, perhaps before the barrier has returned on this rank.
        with suppress(PeerLostError):
            comm.barrier()
        waits: list[Callable[[], object]] = [
            lambda: work.wait(never_s),
            future.wait,
            lambda: part.barrier(timeout=never_s),
        ]
        return [*map(raised, waits), Raised.of(work.exception())]

    world.run(together)
    started = time.monotonic()
    found = world.run(program, world.never_s, size=2, on_failure="continue")[0]
    assert time.monotonic() - started < world.soon_s, "the other rank was notified late"
    assert isinstance(found, list), found
    for error in found:
        assert "PeerLostError" in error.kinds, found
        assert error.peer == 1, f"{error} names rank {error.peer}"
        assert "my own mistake" in error.text, str(error)


def late_rank_is_named(world: World) -> None:
    """A collective that one rank never calls ends in a `CommTimeoutError` that names that rank."""

    def program(comm: Communicator) -> str:
        part = comm.dup()
        message = "" if comm.rank == 1 else error_of(lambda: part.barrier(timeout=0.2), CommTimeoutError)
        together(comm)
        return message

    found = world.run(program, size=3)
    assert all("rank 1" in message for message in (found[0], found[2])), found


def first_cause_is_kept(world: World) -> None:
    """After a failure every call fails immediately, on every rank, and quotes the first error."""

    def program(comm: Communicator, soon_s: float, never_s: float) -> list[str]:
        part = comm.dup()
        if part.rank == 0:
            part.abort("the first reason")
        comm.barrier()
        part.abort("a later reason")
        started = time.monotonic()
        message = [
            error_of(lambda: part.all_reduce(numbers(comm, 1), timeout=never_s), AbortedError),
            error_of(lambda: part.send(numbers(comm, 1), 1 - part.rank, timeout=never_s), AbortedError),
        ]
        assert time.monotonic() - started < soon_s, "a broken communicator waited"
        return message

    for message in world.run(program, world.soon_s, world.never_s):
        assert all("the first reason" in sentence for sentence in message), message
