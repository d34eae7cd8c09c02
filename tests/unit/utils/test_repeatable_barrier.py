"""A barrier that is aborted or missed, and called again."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from insides import engine_of

import unisono as un
from unisono.errors import AbortedError, CommTimeoutError
from unisono.utils.repeatable_barrier import RepeatableBarrier

BACKENDS = ("thread", "shm", "gloo")


JOINED = "test_repeatable_barrier/joined"


def wait_until_aborted(comm: un.Communicator, barrier: RepeatableBarrier) -> None:
    control = engine_of(comm).control
    exchange = control.exchange

    def announced(*args: Any) -> Any:
        # Only a rank that has joined is ended by an abort; one that comes later skips the call.
        control.set(JOINED, b"")
        return exchange(*args)

    with (
        patch.object(control, "exchange", announced),
        pytest.raises(AbortedError, match=r"rank 1 of 3, split .*: rank 0 aborted the communicator: too early"),
    ):
        barrier.wait()


def late(comm: un.Communicator) -> int:
    """Rank 1 waits until rank 0 aborts the call; rank 2 comes only then, and skips it."""
    barrier = RepeatableBarrier(comm)
    other = comm.dup()
    if comm.rank == 0:
        other.barrier()
        engine_of(comm).control.get(JOINED, 30.0)
        barrier.abort("too early")
    elif comm.rank == 1:
        other.barrier()
        wait_until_aborted(comm, barrier)
    else:
        other.barrier()
    # All know of the abort.
    other.barrier()
    for _ in range(3):
        barrier.wait()
    return int(comm.all_gather_object(comm.rank)[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_skips_a_call_that_the_others_have_given_up(backend: str) -> None:
    assert un.launch(late, 3, backend, timeout=30) == [2, 2, 2]


def test_the_end_of_the_communicator_ends_the_barrier() -> None:
    def program(comm: un.Communicator) -> None:
        barrier = RepeatableBarrier(comm)
        if comm.rank == 0:
            comm.abort("no more")
            barrier.abort("no more")
        for _ in range(2):
            with pytest.raises(AbortedError, match="no more"):
                barrier.wait()

    un.launch(program, 3, "thread", timeout=30)


def test_after_a_timeout_the_barrier_can_be_repeated() -> None:
    def program(comm: un.Communicator) -> bool:
        other = comm.dup()
        with un.init("thread") if comm.size == 1 else comm.dup() as part:
            barrier = RepeatableBarrier(part)
            if comm.rank != 0:
                with pytest.raises(CommTimeoutError, match="rank 0"):
                    barrier.wait()
            # Rank 0 waits for them in the store, without a timeout of its own.
            other.barrier(timeout=30)
            barrier.wait()
        return True

    assert un.launch(program, 3, "thread", timeout=1) == [True] * 3
