"""How the ranks of a torch group come to a communicator: torch's store tells them where our control plane is."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unisono import wire
from unisono.bootstrap.hosting import Lease, lease
from unisono.communicator import Communicator
from unisono.control import Control, LocalHub
from unisono.control.client import SocketControl
from unisono.errors import CommTimeoutError, MismatchError, UnavailableError
from unisono.group import Group
from unisono.hosts import address_towards, host_identity, shm_obstacle
from unisono.interop.options import GroupOptions
from unisono.transport import Options
from unisono.transports import TRANSPORTS

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Meeting", "meet"]

_PLACE = "unisono/place"


@dataclass(frozen=True, slots=True)
class Meeting:
    """What came of it on this rank.

    Attributes:
        comm: The communicator, for any thread.
        control: This rank's handle to the control plane.
        group: The group as the control plane knows it.
    """

    comm: Communicator
    control: Control
    group: Group


def meet(store: dist.Store, rank: int, size: int, timeout_s: float, wishes: GroupOptions) -> Meeting:
    """Join the other ranks of a new torch group. Each of them calls it, with a store of this group alone.

    Rank 0 hosts a control plane and tells its address, with a fresh secret, by the store: who can read the
    store can join.

    Raises:
        CommTimeoutError: Ranks are missing.
        MismatchError: Ranks wish for different things.
        UnavailableError: The transport asked for is not to be had between these ranks.
    """
    if size == 1:
        return _joined(LocalHub().control(), "thread", Group.world(0, 1), timeout_s, wishes, lambda: None)
    held: Lease | None = None
    _tell(store, _seat(rank), (host_identity(), shm_obstacle(), wishes.transport))
    if rank == 0:
        held = _host(store, size, timeout_s)
    try:
        host, port, secret, name, transport, problem = _read(store, _PLACE, timeout_s, "rank 0 has not told its place")
        if problem is not None:
            raise (MismatchError if transport is None else UnavailableError)(problem, rank=rank, size=size)
        control = SocketControl((host, port), secret, timeout_s)
        try:
            done = _joined(
                control, transport, Group.world(rank, size, name), timeout_s, wishes, _release(control, held)
            )
        except BaseException:
            control.close()
            raise
    except BaseException:
        if held is not None:
            held.release()
        raise
    if rank == 0:
        # Everybody has read it. Who makes a group of the same name again must not find it.
        with contextlib.suppress(RuntimeError):
            for key in (_PLACE, *(_seat(r) for r in range(size))):
                store.delete_key(key)
    return done


def _joined(
    control: Control, transport: str, group: Group, timeout_s: float, wishes: GroupOptions, release: Callable[[], None]
) -> Meeting:
    address = control.local_host if isinstance(control, SocketControl) else "127.0.0.1"
    options = Options(transport, "cpu", timeout_s, address, wishes.chunk_bytes)
    connected = TRANSPORTS[transport].connect(group, control, options)
    comm = Communicator(connected, control, options, check=wishes.check)
    comm.share()
    comm.on_close(release)
    return Meeting(comm, control, group)


def _release(control: SocketControl, held: Lease | None) -> Callable[[], None]:
    def release() -> None:
        control.close()
        if held is not None:
            held.release()

    return release


def _host(store: dist.Store, size: int, timeout_s: float) -> Lease | None:
    """As rank 0: hear where everybody is, choose, and tell the place, or what is wrong."""
    seats = [_read(store, _seat(r), timeout_s, f"rank {r} has not come") for r in range(size)]
    hosts, obstacles, asked = zip(*seats, strict=True)
    try:
        transport = _chosen(set(hosts), next(filter(None, obstacles), None), asked)
    except MismatchError as error:
        _tell(store, _PLACE, ("", 0, b"", "", None, error.message))
        return None
    except UnavailableError as error:
        _tell(store, _PLACE, ("", 0, b"", "", "none", error.message))
        return None
    here = "127.0.0.1" if len(set(hosts)) == 1 else address_towards(os.environ.get("MASTER_ADDR", "192.0.2.1"))
    held = lease(f"torch groups at {here}", None, here, 0)
    _tell(store, _PLACE, (*held.server.address, held.secret, f"torch/{secrets.token_hex(4)}", transport, None))
    return held


def _chosen(hosts: set[str], obstacle: str | None, asked: tuple[str, ...]) -> str:
    """The transport for these ranks."""
    if len(set(asked)) > 1:
        quoted = "; ".join(f"rank {r}: {name!r}" for r, name in enumerate(asked))
        raise MismatchError(f"ranks wish for different transports: {quoted}")
    why_not = obstacle or ("the ranks are on several hosts" if len(hosts) > 1 else None)
    if asked[0] == "auto":
        return "gloo" if why_not else "shm"
    if asked[0] == "shm" and why_not:
        raise UnavailableError(f"shared memory cannot carry this group: {why_not}; ask for transport='auto'")
    return asked[0]


def _seat(rank: int) -> str:
    return f"unisono/rank {rank}"


def _tell(store: dist.Store, key: str, value: object) -> None:
    # Stores take bytes as well; torch's annotations do not say so.
    store.set(key, wire.encode(value))  # type: ignore[arg-type]


def _read(store: dist.Store, key: str, timeout_s: float, missing: str) -> Any:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise CommTimeoutError(f"{missing} within {timeout_s:g} s. Is it alive, and in this group?") from error
    return wire.decode(store.get(key))
