"""Transport on a process group that the caller created and owns, with unisono's own control plane."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from unisono import serialization
from unisono.control.client import SocketControl
from unisono.control.server import ControlServer
from unisono.core import clock
from unisono.core.group import Group
from unisono.core.tensors import view_of
from unisono.core.transport import Options
from unisono.diagnostics.tracebacks import show_errors
from unisono.errors import CommError, CommTimeoutError
from unisono.host.network import address_for_others, host_identity
from unisono.transports.torch.transport import TorchTransport, translated

__all__ = ["MAKERS", "adopt", "resolve_group"]

MAKERS: dict[type, Callable[..., Any]] = {}
"""Functions that make communicators from special group classes. `interop` registers its own classes here."""

_RECORD_BYTES = 256


def adopt(
    group: dist.ProcessGroup, timeout_s: float, chunk_bytes: int
) -> tuple[TorchTransport, SocketControl, Options, Callable[[], None]]:
    """Return this rank's transport, control handle and options, and a function that closes the control plane.

    Rank 0 hosts the control plane, and sends its address and secret over the group itself. The group remains unchanged
    and is never closed. Subgroups use the control plane's store for their rendezvous.

    Raises:
        CommError: The group's backend cannot be wrapped.
        CommTimeoutError: Not all members joined in time.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if _on_cuda(group) else torch.device("cpu")
    backend = group._get_backend(device)
    kind = backend.name().lower()
    if device.type not in TorchTransport.declared(kind).devices:
        raise CommError(f"a group of backend {kind!r} for {device.type} cannot be wrapped; those of gloo and nccl can")
    rank = group.rank()
    size = group.size()
    all_gather = partial(_all_gather, backend, size, device, clock.now() + timeout_s)
    hosts = [record.decode() for record in all_gather(host_identity().encode())]
    server: ControlServer | None = None
    record = b""
    with contextlib.ExitStack() as undo:
        if rank == 0:
            # If there are several hosts, use the network interface on the route to the job's master, because other
            # hosts can also reach this interface.
            far = None if len(set(hosts)) == 1 else os.environ.get("MASTER_ADDR", "192.0.2.1")
            server = ControlServer(
                secret := secrets.token_bytes(32), "127.0.0.1" if far is None else address_for_others(far)
            )
            undo.callback(server.close)
            record = serialization.encode((*server.address, secret, f"adopted/{secrets.token_hex(4)}"))
        host, port, secret, name = serialization.decode(all_gather(record)[0])
        control = SocketControl((host, port), secret, timeout_s, host_rank=0)
        undo.callback(control.close)
        world = Group.world(rank, size, name)
        # Join first: ranks can exchange values only within a group.
        control.join(world)
        options = Options(kind, str(device), timeout_s, control.address_for_all(world, timeout_s), chunk_bytes)
        transport = TorchTransport(world, backend, control, options, owned=False)
        return transport, control, options, undo.pop_all().close


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, or the default group for None. Also sets up error reports as `unisono.init` does.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: There is no default group, or this process is not in the group.
    """
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ()
    show_errors(*ranks)
    if group is None:
        if not ranks:
            raise ValueError("torch has no default group yet: call dist.init_process_group, or pass a group")
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in the group; only its members call from_group")
    raise TypeError(f"group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")


def _on_cuda(group: dist.ProcessGroup) -> bool:
    kinds = {device.type for device in group._device_types}
    if not kinds & {"cpu", "cuda"}:
        raise CommError(f"a group for {sorted(kinds)} cannot be wrapped; only cpu and cuda groups can")
    return "cpu" not in kinds


def _all_gather(backend: Any, size: int, device: torch.device, deadline: float, data: bytes) -> list[bytes]:
    """Gather a few bytes from each rank with torch's all_gather, because there is no control plane yet."""
    if len(data) >= _RECORD_BYTES:
        raise CommError(f"{len(data)} bytes do not fit in a record of {_RECORD_BYTES}")
    padded = bytes([len(data)]) + data.ljust(_RECORD_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    outputs = [torch.empty_like(mine) for _ in range(size)]
    try:
        # Never pass zero, which torch treats as no timeout.
        backend.allgather([outputs], [mine]).wait(timedelta(seconds=max(deadline - clock.now(), 0.001)))
    except RuntimeError as error:
        found = translated(error, [])
        # Don't detect timeouts with the clock alone, because torch's timer may expire slightly before the deadline.
        if not isinstance(found, CommTimeoutError) and clock.now() < deadline:
            raise found from error
        raise CommTimeoutError(
            f"not all of the {size} ranks of the torch group joined in time. Are all of them running, and does "
            "each of them call from_group?"
        ) from error
    raw = [bytes(view_of(here)) for here in (t.cpu() for t in outputs)]
    return [record[1 : 1 + record[0]] for record in raw]
