"""Rendezvous at an address: host or reach the control plane, register the rank, and wait for all ranks."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
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
    """Arguments that the caller passed to `init`.

    Attributes:
        init_method: As passed.
        rank, size: Rank and number of ranks, as passed to `init`. If None was passed, rank and size may be set from the
            environment, so that errors can name the rank.
        deadline: Time by which all ranks must have joined, on the library's clock.
        secret: As passed.
    """

    init_method: str | None
    rank: int | None
    size: int | None
    deadline: float
    secret: str | bytes | None

    def numbers(self) -> tuple[int, int]:
        """Return rank and size; raise `ValueError` if they were not passed or are inconsistent."""
        if self.rank is None or self.size is None:
            raise ValueError(
                f"{self.init_method} gives an address, but not the rank of this process: pass rank and world_size too"
            )
        return checked(self.rank, self.size)


def checked(rank: int, size: int) -> tuple[int, int]:
    """Return rank and size; raise `ValueError` if they are inconsistent."""
    for name, number in (("rank", rank), ("world_size", size)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{name} must be a whole number, not {number!r}")
    if size < 1:
        raise ValueError(f"world_size must be at least 1, not {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not among 0 to {size - 1}, the ranks of a world of {size}")
    return rank, size


def env_number(name: str) -> int | None:
    """Return the number in an environment variable; None if the variable is unset or empty."""
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is not a number") from None


@dataclass(slots=True)
class Rendezvous:
    """This process's rank in the job, and its connection to the control plane.

    The process has already joined the group of all ranks. To be notified of failures, it must join the group again, and
    pass a callback.

    Attributes:
        rank, size: This process's rank, and the number of ranks.
        local_rank: This process's rank on its host; None if unknown.
        control: This process's handle to the control plane.
        address: Address at which the other ranks can reach this host.
        name: Name of the group of all ranks, different for each `init` of a job.
        source: How the rank and the rendezvous were found, as one line for the log.
        on_close: What `close` does after it has closed `control`.
        network: Backend that "auto" uses between hosts; "" if it depends on the hosts.
    """

    rank: int
    size: int
    local_rank: int | None
    control: ControlPlane
    address: str
    name: str
    source: str
    on_close: ExitStack = field(default_factory=ExitStack, repr=False)
    network: str = ""

    def close(self) -> None:
        """Leave the job without an error. A server in this process runs until the other ranks have left. Idempotent."""
        self.control.close()
        self.on_close.close()


# -- servers of this process -----------------------------------------------------------------------
# Seconds to wait for other ranks to exit: enough if all exit at about the same time, and not too long if one never
# does.
LINGER_S = 5.0


@dataclass(slots=True)
class Lease:
    """Reference-counted lease on one of this process's servers; callers that request the same key share it.

    Attributes:
        server: The control-plane server.
        secret: Its secret.
        users: Number of callers that have not yet released the lease.
        withdraw: Function called after the last release, before the server shuts down.
    """

    server: ControlServer
    secret: bytes
    users: int
    withdraw: Callable[[], None]

    def release(self) -> None:
        """Release the lease. After the last release, the server shuts down in the background once clients have left."""
        with _lock:
            self.users -= 1
            if not self.users:
                self.withdraw()
                self.server.retire(LINGER_S)


# Global, because each `init` of a job must find the server of the previous `init` at the same address. Each key
# contains the process ID, because a forked child inherits its parent's leases but does not run its parent's servers.
_leases: dict[tuple[int, str], Lease] = {}
# Protects `_leases` and the leases in it.
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
    """Return a lease on the server that this process runs under `key`, or on a new server.

    If `secret` is None, a new server generates a secret. For `restarts`, see `ControlState`.

    A job's next `init` finds the server of the previous `init`, even if that server is about to shut down.

    Raises:
        ValueError: The server is running with a different secret.
        CommError: A new server cannot listen on this address.
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
    """Return whether a server in this process listens on an address, or has recently done so."""
    with _lock:
        return any(process == os.getpid() and held.server.address == address for (process, _), held in _leases.items())


def _close_servers() -> None:
    # Close this process's handles first and its servers afterwards, regardless of the order of exit hooks.
    close_all()
    with _lock:
        mine = [held for (process, _), held in _leases.items() if process == os.getpid()]
    for held in mine:
        if held.users:
            held.withdraw()
        held.server.retire(LINGER_S)
    for held in mine:
        held.server.close(LINGER_S)


# -- joining ---------------------------------------------------------------------------------------
class MovedError(CommError):
    """The ranks do not meet at this address now; another address, or a later attempt, may work."""


@dataclass(frozen=True, slots=True)
class RankClaim:
    """Rank, job and deadline of a process that wants to join.

    Attributes:
        rank, size, local_rank: As for `Rendezvous`.
        deadline: Time by which all ranks must have joined, on the library's clock.
        source: As in `Rendezvous`.
        job: Prefix of the names of the job's groups. Ranks of different jobs never meet, even at the same address.
        restarts: Whether a process that is killed during the rendezvous may be restarted. If restarts are possible, the
            other ranks wait until their deadline for a killed process's replacement, instead of raising an error.
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
    """Return the rendezvous at a server's address, once all ranks have joined.

    If the server closes, it belonged to an earlier `init`, so the call waits for the next server. The call also waits
    if the server is lost and its process may be restarted.

    Args:
        claim: This process's claim.
        address: The server's address.
        secret: Its secret.
        lease: The lease on the server if this process hosts it, else None. Released on failure.

    Raises:
        CommError: As for `find`.
    """
    lost: MovedError | None = None
    with ExitStack() as release:
        if lease is not None:
            release.callback(lease.release)
        while True:
            try:
                patience_s = max(claim.left_s, 0.1)
                place = confirm(claim, SocketControl(address, secret, patience_s, host_rank=0, rank=claim.rank))
                place.on_close = release.pop_all()
                return place
            except MovedError as error:
                lost = error
            except CommTimeoutError as error:
                if lost is not None:
                    error.add_note(f"rank 0 was reached before: {lost}")
                raise


def claim_rank(claim: RankClaim, address: tuple[str, int], secret: bytes) -> None:
    """Claim rank 0 at the server of another process, which may have claimed rank 0 already.

    All errors except `MismatchError` are ignored.

    Raises:
        MismatchError: The process that runs the server has already claimed rank 0; if its group is still forming, the
            group's ranks also get the error.
    """
    try:
        with closing(SocketControl(address, secret, _CLAIM_WITHIN_S)) as control:
            # Wait until the other process has joined, so that its claim precedes this process's claim.
            control.get(f"{claim.job}1/{_OPEN}", _CLAIM_WITHIN_S)
            control.register_rank(claim.job, claim.rank, claim.size, _process(os.getpid()))
    except MismatchError:
        raise
    except CommError:
        return


def confirm(claim: RankClaim, control: SocketControl, moved: Callable[[], bool] | None = None) -> Rendezvous:
    """Return the rendezvous at the server to which `control` is connected, once all ranks have joined.

    Args:
        claim: This process's claim.
        control: This rank's handle, which is closed on failure.
        moved: Function that returns whether the rendezvous has moved to another address; polled until rank 0 has
            joined.

    Raises:
        MovedError: `moved` has returned True, or the server has exited and a restarted rank 0 may start another server.
        CommError: As for `find`.
    """
    try:
        name = _gather(claim, control, moved)
    except BaseException as error:
        ended = control.server_lost and (claim.restarts or isinstance(error, ClosedError))
        # Report why this rank gives up, because otherwise the other ranks would assume that this rank was killed, and
        # wait for its restart.
        control.on_process_exit(None if isinstance(error, MovedError) else error)
        if ended and isinstance(error, CommError):
            raise MovedError(error.message) from error
        raise
    return Rendezvous(claim.rank, claim.size, claim.local_rank, control, control.local_host, name, claim.source)


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
    """Poll until rank 0 has joined; raise `MovedError` if `moved` returns True before that."""
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
    """Return a name that is unique to this process. The PID is part of the cache key, so a fork gets a new name."""
    return f"{number}-{uuid.uuid4().hex}"


# Global, because the groups of two single-rank jobs must not have the same name.
_worlds_of_one = itertools.count(1)


def alone(_request: InitRequest) -> Rendezvous:
    """Return the rendezvous of a world of one, for a process without a rank. Opens no sockets and starts no threads."""
    control = LocalHub().control()
    close_at_exit(control)
    name = f"alone{next(_worlds_of_one)}"
    control.join(Group.world(0, 1, name))
    return Rendezvous(0, 1, 0, control, "127.0.0.1", name, "no launcher and no init_method: a world of one")
