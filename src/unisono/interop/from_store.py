"""Communicators for the ranks of a torch group. The ranks get the control plane's address from torch's store."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unisono import serialization
from unisono.bootstrap.rendezvous import Lease, acquire
from unisono.communicator import Communicator
from unisono.control import LocalHub
from unisono.control.client import SocketControl
from unisono.core.control import ControlPlane
from unisono.core.failure import Cause, error_of
from unisono.core.group import Group
from unisono.core.transport import Options
from unisono.errors import CommError, CommTimeoutError, MismatchError, UnavailableError
from unisono.host.native import core_build
from unisono.host.network import address_for_others, host_identity, in_zone_of, why_no_shm
from unisono.interop.options import GroupOptions
from unisono.launcher.api import network_of
from unisono.transports import TRANSPORTS

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["JoinedGroup", "meet", "publish", "read"]

_ADDRESS_KEY = "unisono/place"
_FAILED = "failed"
_REACH_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """This rank's handles to a group that it has joined.

    Attributes:
        comm: The communicator, usable from any thread.
        control: This rank's handle to the control plane.
        group: The group, as registered in the control plane.
    """

    comm: Communicator
    control: ControlPlane
    group: Group


def meet(store: dist.Store, rank: int, size: int, timeout_s: float, group_options: GroupOptions) -> JoinedGroup:
    """Join the other ranks of a new torch group. Every rank calls `meet`, with a store that only the new group uses.

    Rank 0 hosts a control plane and publishes its address and a fresh secret in the store, so any process that can read
    the store can join.

    Raises:
        CommTimeoutError: Ranks are missing.
        MismatchError: Ranks request different options.
        UnavailableError: The requested transport is not available between the group's ranks.
    """
    if size == 1:
        return _joined(LocalHub().control(), "thread", Group.world(0, 1), timeout_s, group_options)
    publish(store, _rank_key(rank), (host_identity(), why_no_shm(), core_build(), group_options.transport))
    with contextlib.ExitStack() as undo:
        if rank == 0 and (held := _host(store, size, timeout_s)) is not None:
            undo.callback(held.release)
        published = read(store, _ADDRESS_KEY, timeout_s, "rank 0 has not published its address")
        if published[0] == _FAILED:
            raise error_of(Cause(published[1], None, published[2]), Group.world(rank, size))
        _, host, port, secret, name, transport = published
        # Rank 0 is already listening, so a short limit for reaching it is enough.
        control = SocketControl(
            (in_zone_of(host, os.environ.get("MASTER_ADDR", "")), port),
            secret,
            timeout_s,
            reach_within_s=min(timeout_s, _REACH_WITHIN_S),
            host_rank=0,
        )
        undo.callback(control.close)
        joined = _joined(control, transport, Group.world(rank, size, name), timeout_s, group_options)
        # The group is joined: from now on, closing its communicator ends the connection, and then rank 0's lease.
        joined.comm.after_close(undo.pop_all().close)
    if rank == 0:
        # All ranks have read the address, so delete it: a later group with the same name must not read it.
        with contextlib.suppress(RuntimeError):
            for key in (_ADDRESS_KEY, *map(_rank_key, range(size))):
                store.delete_key(key)
    return joined


def _joined(
    control: ControlPlane, transport: str, group: Group, timeout_s: float, group_options: GroupOptions
) -> JoinedGroup:
    control.join(group)
    address = control.address_for_all(group, timeout_s) if isinstance(control, SocketControl) else "127.0.0.1"
    options = Options(transport, "cpu", timeout_s, address, group_options.chunk_bytes)
    connected = TRANSPORTS[transport].connect(group, control, options)
    comm = Communicator(connected, control, options, check=group_options.check)
    comm.allow_any_thread()
    return JoinedGroup(comm, control, group)


def _host(store: dist.Store, size: int, timeout_s: float) -> Lease | None:
    """On rank 0, collect the ranks' hosts, choose the transport, and publish the address or the error."""
    reports = [read(store, _rank_key(r), timeout_s, f"rank {r} has not joined") for r in range(size)]
    hosts, obstacles, builds, requested = zip(*reports, strict=True)
    try:
        transport = _chosen(set(hosts), next(filter(None, obstacles), None), builds, requested)
    except CommError as error:
        publish(store, _ADDRESS_KEY, (_FAILED, type(error).__name__, error.message))
        return None
    here = "127.0.0.1" if len(set(hosts)) == 1 else address_for_others(os.environ.get("MASTER_ADDR", "192.0.2.1"))
    held = acquire(f"torch groups at {here}", None, here, 0)
    publish(
        store, _ADDRESS_KEY, ("here", *held.server.address, held.secret, f"torch/{secrets.token_hex(4)}", transport)
    )
    return held


def _chosen(hosts: set[str], obstacle: str | None, builds: tuple[str, ...], requested: tuple[str, ...]) -> str:
    """Return the transport that all ranks of the group will use."""
    name = requested[0]
    if len(set(requested)) > 1:
        quoted = "; ".join(f"rank {r}: {other!r}" for r, other in enumerate(requested))
        raise MismatchError(f"ranks request different transports: {quoted}")
    why_not = obstacle or ("the ranks are on several hosts" if len(hosts) > 1 else None)
    if name == "auto":
        return "shm" if why_not is None and len(set(builds)) == 1 else network_of(builds)
    try:
        in_process = TRANSPORTS[name].in_process
    except ValueError as error:
        raise UnavailableError(str(error)) from error
    if in_process:
        raise UnavailableError(f"ranks of transport {name!r} live in one process, but those of torch do not")
    if name == "shm" and why_not:
        raise UnavailableError(f"shared memory cannot serve this group: {why_not}; use transport='auto'")
    return name


def _rank_key(rank: int) -> str:
    return f"unisono/rank {rank}"


def publish(store: dist.Store, key: str, value: object) -> None:
    """Set a key of a torch store to a value that `unisono.serialization` supports."""
    # Stores also accept bytes, although torch's annotation names only `str`.
    store.set(key, serialization.encode(value))  # type: ignore[arg-type]


def read(store: dist.Store, key: str, timeout_s: float, missing: str) -> Any:
    """Return the value of a key as soon as a rank has published it.

    Raises:
        CommTimeoutError: The key was not published in time; `missing` names the rank that should have published it.
    """
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        why = f"{missing} within {timeout_s:g} s. Is it alive, and in this group?"
        raise CommTimeoutError(why, waited_s=timeout_s) from error
    return serialization.decode(store.get(key))
