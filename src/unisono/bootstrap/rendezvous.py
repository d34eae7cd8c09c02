"""Rendezvous at an address: connect, register the rank, and wait until all ranks have registered."""

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

__all__ = ["MovedError", "RankClaim", "claim_rank", "confirm", "meet"]

_LOOK_EVERY_S = 0.05
_CLAIM_WITHIN_S = 1.0
_OPEN = "open"


class MovedError(Exception):
    """The ranks meet at another place than was thought."""


@dataclass(frozen=True, slots=True)
class RankClaim:
    """Rank, job and deadline of a process that wants to join.

    Attributes:
        rank, size, local_rank: As in `Rendezvous`.
        deadline: On the monotonic clock.
        source: As in `Rendezvous`.
        job: Prefix of the names of its worlds; ranks of different jobs never meet, not even at one address.
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


def meet(claim: RankClaim, address: tuple[str, int], secret: bytes, lease: Lease | None = None) -> Rendezvous:
    """Return the rendezvous at the server of this address, when all ranks have joined.

    A server that closes meanwhile belonged to an earlier `init`; the call waits for the next one.

    Args:
        claim: The claim of this process.
        address: The server's address.
        secret: Its secret.
        lease: Set if this process hosts the server; released on failure.

    Raises:
        CommError: As for `find`.
    """
    try:
        while True:
            try:
                patience_s = max(claim.left_s, 0.1)
                return confirm(claim, SocketControl(address, secret, patience_s, host_rank=0, rank=claim.rank), lease)
            except ClosedError:
                if not claim.left_s:
                    raise
    except BaseException:
        if lease is not None:
            lease.release()
        raise


def claim_rank(claim: RankClaim, address: tuple[str, int], secret: bytes) -> None:
    """Claim rank 0 at a server that this process should host and cannot. Other errors are not reported.

    Raises:
        MismatchError: Another process holds it; the ranks that gather there are notified, too.
    """
    try:
        control = SocketControl(address, secret, _CLAIM_WITHIN_S)
    except CommError:
        return
    try:
        # Do not take the rank from a process that is about to join.
        control.get(f"{claim.job}1/{_OPEN}", _CLAIM_WITHIN_S)
        control.register_rank(claim.job, claim.rank, claim.size, _process(os.getpid()))
    except MismatchError:
        raise
    except CommError:
        return
    finally:
        control.close()


def confirm(
    claim: RankClaim, control: SocketControl, lease: Lease | None = None, moved: Callable[[], bool] | None = None
) -> Rendezvous:
    """Return the rendezvous at the server of `control`, when all ranks have joined; close `control` on failure.

    Args:
        claim: The claim of this process.
        control: This rank's handle.
        lease: Set if this process hosts the server.
        moved: Returns whether the ranks meet elsewhere. Called while rank 0 has not joined.

    Raises:
        MovedError: They do.
        ClosedError: The server belonged to an earlier `init`.
        CommError: As for `find`.
    """
    try:
        name = _gather(claim, control, moved)
    except BaseException:
        control.close()
        raise
    server, release = (None, nothing) if lease is None else (lease.server, lease.release)
    return Rendezvous(
        claim.rank, claim.size, claim.local_rank, control, server, control.local_host, name, claim.source, release
    )


def _gather(claim: RankClaim, control: SocketControl, moved: Callable[[], bool] | None) -> str:
    try:
        name = control.register_rank(claim.job, claim.rank, claim.size, _process(os.getpid()))
    except MismatchError:
        if moved is not None and moved():
            raise MovedError from None
        raise
    group = Group.world(claim.rank, claim.size, name)
    control.join(group)
    if claim.rank == 0:
        control.set(_open(group), b"")
    elif moved is not None:
        _await_rank_0(claim, control, group, moved)
    control.exchange(group, "init", None, claim.left_s)
    return name


def _await_rank_0(claim: RankClaim, control: SocketControl, group: Group, moved: Callable[[], bool]) -> None:
    """Poll until rank 0 has joined here, or has turned out to be elsewhere."""
    while not control.check([_open(group)]) and claim.left_s:
        cause = control.first_cause(group)
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
