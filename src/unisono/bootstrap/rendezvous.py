"""Rendezvous at an address: host or reach the control plane there, register the rank, and wait for all ranks."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.control import LocalHub
from unisono.control.client import SocketControl
from unisono.control.process_exit import CLOSE_SERVERS, close_all, close_at_exit, when_process_ends
from unisono.control.server import ControlServer
from unisono.core import clock
from unisono.core.control import ControlPlane
from unisono.core.failure import error_of
from unisono.core.group import Group
from unisono.errors import ClosedError, CommError, CommTimeoutError, MismatchError

__all__ = [
    "LINGER_S",
    "InitRequest",
    "Lease",
    "MovedError",
    "RankClaim",
    "Rendezvous",
    "acquire",
    "alone",
    "checked",
    "claim_rank",
    "confirm",
    "env_number",
    "hosts_at",
    "meet",
]

_LOOK_EVERY_S = 0.05
_CLAIM_WITHIN_S = 1.0
_OPEN = "open"


@dataclass(slots=True)
class InitRequest:
    """Arguments from the caller of `init`.

    Attributes:
        init_method: As passed.
        rank, size: As passed or as found, so that errors name the rank.
        deadline: Time by which all ranks must have joined, on the library's clock.
        secret: As passed.
    """

    init_method: str | None
    rank: int | None
    size: int | None
    deadline: float
    secret: str | bytes | None

    def numbers(self) -> tuple[int, int]:
        """Return rank and size, if they were given and are consistent."""
        if self.rank is None or self.size is None:
            raise ValueError(
                f"{self.init_method} gives an address, but not the rank of this process: pass rank and world_size too"
            )
        return checked(self.rank, self.size)


def checked(rank: int, size: int) -> tuple[int, int]:
    """Return rank and size, if they are consistent."""
    for name, number in (("rank", rank), ("world_size", size)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{name} must be a whole number, not {number!r}")
    if size < 1:
        raise ValueError(f"world_size must be at least 1, not {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not among 0 to {size - 1}, the ranks of a world of {size}")
    return rank, size


def env_number(name: str) -> int | None:
    """Return the number in an environment variable; None if it is unset or empty."""
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is not a number") from None


def _nothing() -> None:
    """Do nothing: there is nothing to release."""


@dataclass(slots=True)
class Rendezvous:
    """This process's place in the world. Its group is already joined; join again to be notified of failures.

    Attributes:
        rank, size: This process's rank, and the number of ranks.
        local_rank: Its number on its host, if known.
        control: Its handle to the control plane.
        server: The control plane itself, if this process hosts it.
        address: This host's address that the other ranks can reach.
        name: The name of the world's group, different for each `init` of a job.
        source: How the place was found, and why, as one line for the log.
        network: Backend that "auto" uses between hosts; "" if it depends on the hosts.
    """

    rank: int
    size: int
    local_rank: int | None
    control: ControlPlane
    server: ControlServer | None
    address: str
    name: str
    source: str
    release: Callable[[], None] = field(default=_nothing, repr=False)
    network: str = ""

    def close(self) -> None:
        """Leave without an error. Idempotent. A server in this process serves the others until they have left."""
        release = self.release
        self.release = _nothing
        self.control.close()
        release()


# -- servers of this process -----------------------------------------------------------------------
# Long enough for ranks that end at about the same time, short enough not to delay this one much if another never ends.
LINGER_S = 5.0


@dataclass(slots=True)
class Lease:
    """Right to use one of this process's servers, shared by all callers that requested the same key.

    Attributes:
        server: The server.
        secret: Its secret.
        users: Number of users that have not yet released it.
        withdraw: Called when the last user has released it, before the server ends.
    """

    server: ControlServer
    secret: bytes
    users: int
    withdraw: Callable[[], None]

    def release(self) -> None:
        """Release this use. After the last one, the server shuts down in the background once its clients have left."""
        with _lock:
            self.users -= 1
            if not self.users:
                self.withdraw()
                self.server.retire(LINGER_S)


# Global, because the address is: each `init` of a job must find the server of the previous one. Keyed by process,
# because a forked child inherits its parent's entries but does not serve them.
_leases: dict[tuple[int, str], Lease] = {}
# Guards the leases above.
_lock = threading.Lock()


def acquire(
    key: str,
    secret: bytes | None,
    host: str,
    port: int,
    withdraw: Callable[[], None] = lambda: None,
    *,
    restarts: bool = True,
) -> Lease:
    """Return the server that this process runs under `key`, or a new one.

    Without a secret, it makes its own. `restarts` is as for `ControlState`.

    The next `init` of a job finds the previous one's server, even if that is about to end.

    Raises:
        ValueError: The server is running with a different secret.
        CommError: A new one cannot listen there.
    """
    with _lock:
        known = _leases.get((os.getpid(), key))
        if known is not None and known.users and secret not in (None, known.secret):
            raise ValueError(f"this process hosts {key} already, with another secret; pass the same secret")
        if known is not None and secret in (None, known.secret) and known.server.stay():
            known.users += 1
            return known
        chosen = secrets.token_hex(32).encode() if secret is None else secret
        server = ControlServer(chosen, host, port, restarts=restarts)
        made = _leases[os.getpid(), key] = Lease(server, chosen, 1, withdraw)
    when_process_ends(_close_servers, CLOSE_SERVERS)
    return made


def hosts_at(address: tuple[str, int]) -> bool:
    """Return whether a server in this process listens on an address, or did recently."""
    return any(process == os.getpid() and held.server.address == address for (process, _), held in _leases.items())


def _close_servers() -> None:
    # This process's handles close first, whatever the order of its exit hooks.
    close_all()
    mine = [held for (process, _), held in _leases.items() if process == os.getpid()]
    for held in mine:
        if held.users:
            held.withdraw()
        held.server.retire(LINGER_S)
    for held in mine:
        held.server.close(LINGER_S)


# -- joining ---------------------------------------------------------------------------------------
class MovedError(CommError):
    """The ranks meet at a different address than expected."""


@dataclass(frozen=True, slots=True)
class RankClaim:
    """Rank, job and deadline of a process that wants to join.

    Attributes:
        rank, size, local_rank: As in `Rendezvous`.
        deadline: On the library's clock.
        source: As in `Rendezvous`.
        job: Prefix of the names of its worlds; ranks of different jobs never meet, not even at the same address.
        restarts: Whether a process that is killed while ranks gather may be restarted: then the others wait for it
            until their deadline, instead of raising an error.
    """

    rank: int
    size: int
    local_rank: int | None
    deadline: float
    source: str
    job: str = "world"
    restarts: bool = True

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - clock.now())


def meet(claim: RankClaim, address: tuple[str, int], secret: bytes, lease: Lease | None = None) -> Rendezvous:
    """Return the rendezvous at this server address, once all ranks have joined.

    A server that closes meanwhile belonged to an earlier `init`, and a lost one to a process that may be restarted, so
    the call waits for the next one.

    Args:
        claim: This process's claim.
        address: The server's address.
        secret: Its secret.
        lease: Set if this process hosts the server; released on failure.

    Raises:
        CommError: As for `find`.
    """
    lost: MovedError | None = None
    try:
        while True:
            try:
                patience_s = max(claim.left_s, 0.1)
                return confirm(claim, SocketControl(address, secret, patience_s, host_rank=0, rank=claim.rank), lease)
            except MovedError as error:
                lost = error
            except CommTimeoutError as error:
                if lost is not None:
                    error.add_note(f"rank 0 was reached before: {lost}")
                raise
    except BaseException:
        if lease is not None:
            lease.release()
        raise


def claim_rank(claim: RankClaim, address: tuple[str, int], secret: bytes) -> None:
    """Claim rank 0 at a server that this process should host but cannot. Other errors are not reported.

    Raises:
        MismatchError: Another process holds it; the ranks gathering there are also notified.
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
    """Return the rendezvous at the server of `control`, once all ranks have joined; close `control` on failure.

    Args:
        claim: This process's claim.
        control: This rank's handle.
        lease: Set if this process hosts the server.
        moved: Function that returns whether the ranks meet elsewhere, called while rank 0 has not joined.

    Raises:
        MovedError: They do; or the server has ended, and rank 0's next process may open another.
        CommError: As for `find`.
    """
    try:
        name = _gather(claim, control, moved)
    except BaseException as error:
        ended = control.server_lost and (claim.restarts or isinstance(error, ClosedError))
        # Report the reason, or the others would wait for this rank as they do for a killed one.
        control.on_process_exit(None if isinstance(error, MovedError) else error)
        if ended and isinstance(error, CommError):
            raise MovedError(error.message) from error
        raise
    server, release = (None, _nothing) if lease is None else (lease.server, lease.release)
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
    """A name unique to this process; a fork has another number."""
    return f"{number}-{uuid.uuid4().hex}"


# Global, because two single-rank worlds must not have the same name.
_worlds_of_one = itertools.count(1)


def alone(_request: InitRequest) -> Rendezvous:
    """Return a single-rank world, because nothing defines ranks. Opens no sockets, starts no threads."""
    control = LocalHub().control()
    close_at_exit(control)
    name = f"alone{next(_worlds_of_one)}"
    control.join(Group.world(0, 1, name))
    return Rendezvous(0, 1, 0, control, None, "127.0.0.1", name, "no launcher and no init_method: a world of one")
