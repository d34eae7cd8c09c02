"""From an address to a place: connect, take a seat, and wait until all ranks have one."""

from __future__ import annotations

import functools
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from unisono.bootstrap.result import Rendezvous, nothing
from unisono.bootstrap.server_lease import Lease
from unisono.control.client import SocketControl
from unisono.core.failure import error_of
from unisono.core.group import Group
from unisono.errors import ClosedError, CommError, MismatchError

__all__ = ["Claim", "MovedError", "claim_rank", "confirm", "meet"]

_LOOK_EVERY_S = 0.05
_CLAIM_WITHIN_S = 1.0
_OPEN = "open"


class MovedError(Exception):
    """The ranks meet at another place than was thought."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who wants to meet whom, and until when.

    Attributes:
        rank, size, local_rank: As in `Rendezvous`.
        deadline: On the monotonic clock.
        source: As in `Rendezvous`.
        job: What the names of its worlds begin with; ranks of different jobs never meet, not even at one address.
    """

    rank: int
    size: int
    local_rank: int | None
    deadline: float
    source: str
    job: str = "world"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, not below 0."""
        return max(0.0, self.deadline - time.monotonic())


def meet(seat: Claim, address: tuple[str, int], secret: bytes, lease: Lease | None = None) -> Rendezvous:
    """The place at the server of this address, when all ranks are there.

    A server that says goodbye meanwhile was that of an earlier `init`; the next one is waited for.

    Args:
        seat: Who this is.
        address: Where the server is.
        secret: Its secret.
        lease: If this process hosts it; let go of if all this fails.

    Raises:
        CommError: As `find` says.
    """
    try:
        while True:
            try:
                patience_s = max(seat.left_s, 0.1)
                return confirm(seat, SocketControl(address, secret, patience_s, host_rank=0, rank=seat.rank), lease)
            except ClosedError:
                if not seat.left_s:
                    raise
    except BaseException:
        if lease is not None:
            lease.release()
        raise


def claim_rank(seat: Claim, address: tuple[str, int], secret: bytes) -> None:
    """Ask for the seat of rank 0 where this process should host and cannot. Whatever else is wrong is not told.

    Raises:
        MismatchError: Another process holds it; those that gather there are told, too.
    """
    try:
        control = SocketControl(address, secret, _CLAIM_WITHIN_S)
    except CommError:
        return
    try:
        # Not to be taken from one who is about to come.
        control.get(f"{seat.job}1/{_OPEN}", _CLAIM_WITHIN_S)
        control.register_rank(seat.job, seat.rank, seat.size, _process(os.getpid()))
    except MismatchError:
        raise
    except CommError:
        return
    finally:
        control.close()


def confirm(
    seat: Claim, control: SocketControl, lease: Lease | None = None, moved: Callable[[], bool] | None = None
) -> Rendezvous:
    """The place at the server that `control` leads to, when all ranks are there; `control` is closed if it fails.

    Args:
        seat: Who this is.
        control: This rank's handle.
        lease: If this process hosts the server.
        moved: Whether the ranks turned out to meet elsewhere. Asked while rank 0 has not come.

    Raises:
        MovedError: They do.
        ClosedError: The server was that of an earlier `init`.
        CommError: As `find` says.
    """
    try:
        name = _gather(seat, control, moved)
    except BaseException:
        control.close()
        raise
    server, let_go = (None, nothing) if lease is None else (lease.server, lease.release)
    return Rendezvous(
        seat.rank, seat.size, seat.local_rank, control, server, control.local_host, name, seat.source, let_go
    )


def _gather(seat: Claim, control: SocketControl, moved: Callable[[], bool] | None) -> str:
    try:
        name = control.register_rank(seat.job, seat.rank, seat.size, _process(os.getpid()))
    except MismatchError:
        if moved is not None and moved():
            raise MovedError from None
        raise
    group = Group.world(seat.rank, seat.size, name)
    control.join(group)
    if seat.rank == 0:
        control.set(_open(group), b"")
    elif moved is not None:
        _await_rank_0(seat, control, group, moved)
    control.exchange(group, "init", None, seat.left_s)
    return name


def _await_rank_0(seat: Claim, control: SocketControl, group: Group, moved: Callable[[], bool]) -> None:
    """Look, now and then, whether this is the place where rank 0 comes."""
    while not control.check([_open(group)]) and seat.left_s:
        cause = control.cause(group)
        if cause is not None:
            raise error_of(cause, group)
        if moved():
            raise MovedError
        time.sleep(_LOOK_EVERY_S)


def _open(group: Group) -> str:
    return f"{group.name}/{_OPEN}"


@functools.cache
def _process(number: int) -> str:
    """A name for this process that no other one has; a fork has another number."""
    return f"{number}-{uuid.uuid4().hex}"
