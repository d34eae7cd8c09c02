"""From an address to a place: connect, take a seat, and wait until all ranks have one."""

from __future__ import annotations

import functools
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from unisono.bootstrap.hosting import Lease
from unisono.bootstrap.place import Place
from unisono.control import Cause, error_of
from unisono.control.client import SocketControl
from unisono.errors import ClosedError, MismatchError
from unisono.group import Group

__all__ = ["MovedError", "Seat", "meet"]

_JOB = "world"
_LOOK_EVERY_S = 0.05


class MovedError(Exception):
    """The ranks meet at another place than was thought."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Who wants to meet whom, and until when.

    Attributes:
        rank, size, local_rank: As in `Place`.
        deadline: On the monotonic clock.
        source: As in `Place`.
    """

    rank: int
    size: int
    local_rank: int | None
    deadline: float
    source: str

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, not below 0."""
        return max(0.0, self.deadline - time.monotonic())


def meet(
    seat: Seat,
    address: tuple[str, int],
    secret: bytes,
    lease: Lease | None = None,
    moved: Callable[[], bool] | None = None,
    reach_within_s: float | None = None,
) -> Place:
    """The place at the server of this address, when all ranks are there.

    A server that says goodbye meanwhile was that of an earlier `init`; the next one is waited for.

    Args:
        seat: Who this is.
        address: Where the server is.
        secret: Its secret.
        lease: If this process hosts it.
        moved: Whether the ranks turned out to meet elsewhere. Asked while rank 0 has not come.
        reach_within_s: Seconds to reach the server, if not all the time there is.

    Raises:
        MovedError: They do.
        CommError: As `find` says.
    """
    try:
        while True:
            left_s = max(seat.left_s, 0.1)
            control = SocketControl(address, secret, left_s if reach_within_s is None else min(left_s, reach_within_s))
            try:
                name = _gather(seat, control, moved)
            except BaseException as error:
                control.close()
                if not (isinstance(error, ClosedError) and seat.left_s):
                    raise
                continue
            server, let_go = (None, _nothing) if lease is None else (lease.server, lease.release)
            return Place(
                seat.rank, seat.size, seat.local_rank, control, server, control.local_host, name, seat.source, let_go
            )
    except BaseException:
        if lease is not None:
            lease.release()
        raise


def _gather(seat: Seat, control: SocketControl, moved: Callable[[], bool] | None) -> str:
    try:
        name = control.enrol(_JOB, seat.rank, _process(os.getpid()))
    except MismatchError:
        if moved is not None and moved():
            raise MovedError from None
        raise
    group = Group.world(seat.rank, seat.size, name)
    control.join(group, _ignore)
    if moved is not None:
        _await_rank_0(seat, control, group, moved)
    control.exchange(group, "init", None, seat.left_s)
    return name


def _await_rank_0(seat: Seat, control: SocketControl, group: Group, moved: Callable[[], bool]) -> None:
    """Look, now and then, whether this is the place where rank 0 comes."""
    key = f"{group.name}/open"
    if seat.rank == 0:
        control.set(key, b"")
    while not control.check([key]) and seat.left_s:
        cause = control.cause(group)
        if cause is not None:
            raise error_of(cause, group)
        if moved():
            raise MovedError
        time.sleep(_LOOK_EVERY_S)


@functools.cache
def _process(number: int) -> str:
    """A name for this process that no other one has; a fork has another number."""
    return f"{number}-{uuid.uuid4().hex}"


def _ignore(_cause: Cause) -> None:
    """Who waits in `_gather` gets the cause as an error."""


def _nothing() -> None:
    """Nothing is to be let go."""
