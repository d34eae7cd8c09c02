"""Laws of failure: every wait ends, on every rank, with an error that says who and why."""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.communicator import Communicator
from unisono.errors import AbortedError, ClosedError, CommError, CommTimeoutError, PeerLostError
from unisono.testing.laws.world import World, numbers, together

__all__ = [
    "a_closed_communicator_refuses",
    "a_failed_rank_is_named_to_the_others",
    "a_late_rank_is_named",
    "abort_ends_every_wait",
    "the_first_cause_stays",
]

_WITHIN_S = 5.0
_ENDLESS_S = 60.0


def abort_ends_every_wait(world: World) -> None:
    """Whatever ranks are waiting for, they get `AbortedError` with the reason, and soon."""

    def program(comm: Communicator) -> str:
        part = comm.dup()
        waits: list[Callable[[], object]] = [
            lambda: part.recv(numbers(comm, 0), 3, timeout=_ENDLESS_S),
            lambda: part.barrier(timeout=_ENDLESS_S),
            lambda: part.irecv(numbers(comm, 0), 3).wait(_ENDLESS_S),
            lambda: part.abort("enough"),
        ]
        # The one who aborts is the last to come here.
        comm.barrier()
        started = time.monotonic()
        said = _error_of(waits[part.rank], AbortedError)
        assert time.monotonic() - started < _WITHIN_S, "the wait went on after the abort"
        later = _error_of(part.barrier, AbortedError)
        together(comm)
        return f"{said} {later}" if part.rank < 3 else f"enough {later}"

    for said in world.run(program, size=4):
        assert said.count("enough") == 2, said


def a_closed_communicator_refuses(world: World) -> None:
    """`ClosedError` for every call; to close it again is harmless."""

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
        return [_error_of(call, ClosedError) for call in calls]

    for said in world.run(program):
        assert all("closed" in sentence for sentence in said), said


def a_failed_rank_is_named_to_the_others(world: World) -> None:
    """A rank that ends by an error of its own is the `peer` of a `PeerLostError` on every rank that needs it."""

    def program(comm: Communicator, collective: bool) -> str:
        if comm.rank == 1:
            raise KeyError("my own mistake")
        if collective:
            comm.all_reduce(numbers(comm, 1), timeout=_ENDLESS_S)
        else:
            comm.recv(numbers(comm, 0), 1, timeout=_ENDLESS_S)
        return "nothing happened"

    for collective in (True, False):
        started = time.monotonic()
        ends = world.run(program, collective, size=3, on_failure="continue")
        assert time.monotonic() - started < _WITHIN_S, "the others were told late"
        assert isinstance(ends[1], KeyError), ends
        for end in (ends[0], ends[2]):
            assert isinstance(end, PeerLostError), ends
            assert end.peer == 1, f"{end!r} names rank {end.peer}"
            assert "my own mistake" in str(end), end


def a_late_rank_is_named(world: World) -> None:
    """A collective that one rank never calls ends in `CommTimeoutError` that names this rank."""

    def program(comm: Communicator) -> str:
        part = comm.dup()
        said = "" if comm.rank == 1 else _error_of(lambda: part.barrier(timeout=0.2), CommTimeoutError)
        together(comm)
        return said

    found = world.run(program, size=3)
    assert all("rank 1" in said for said in (found[0], found[2])), found


def the_first_cause_stays(world: World) -> None:
    """After a failure every call fails at once, on every rank, and quotes what came first."""

    def program(comm: Communicator) -> list[str]:
        part = comm.dup()
        if part.rank == 0:
            part.abort("the first reason")
        comm.barrier()
        part.abort("a later reason")
        started = time.monotonic()
        said = [
            _error_of(lambda: part.all_reduce(numbers(comm, 1), timeout=_ENDLESS_S), AbortedError),
            _error_of(lambda: part.send(numbers(comm, 1), 1 - part.rank, timeout=_ENDLESS_S), AbortedError),
        ]
        assert time.monotonic() - started < _WITHIN_S, "a broken communicator waited"
        return said

    for said in world.run(program):
        assert all("the first reason" in sentence for sentence in said), said


def _error_of(call: Callable[[], object], kind: type[CommError]) -> str:
    """What the call raises, which must be of this kind and know its rank."""
    try:
        call()
    except kind as error:
        assert error.rank is not None, f"{error!r} does not know its rank"
        return str(error)
    return "nothing was raised"
