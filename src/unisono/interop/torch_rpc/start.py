"""Start and end of a program's calls, with torch's signatures."""

from __future__ import annotations

import itertools
import re
import weakref
from datetime import timedelta

import torch.distributed as dist

from unisono import rpc
from unisono.communicator import Communicator
from unisono.interop.from_store import meet
from unisono.interop.options import GroupOptions
from unisono.interop.torch_rpc.constants import seconds
from unisono.interop.torch_rpc.errors import ArgumentError, as_in_torch
from unisono.interop.torch_rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from unisono.interop.torch_rpc.reference import RRef
from unisono.launcher.api import TIMEOUT_S
from unisono.rpc.context import current_agent, find_agent, set_agent

__all__ = ["init_rpc", "is_available", "shutdown"]

_FOREVER_S = 3.0e8
# As torch's RPC, one per process: `shutdown` gets no handle. Kept here, because an agent of unisono owns neither.
_made: weakref.WeakKeyDictionary[rpc.Agent, tuple[Communicator, dist.Store]] = weakref.WeakKeyDictionary()
# Of the process, so that each `init_rpc` meets under a name of its own in a store that outlives it.
_numbers = itertools.count()


class _TorchAgent(rpc.Agent):
    """Makes references that speak as torch's do."""

    rref_class = RRef


def is_available() -> bool:
    """Always true."""
    return True


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Let this process call others and be called. Every rank calls it, with a name of its own.

    Ranks meet as `init_method` of the options says, "env://" by default: MASTER_ADDR and MASTER_PORT, and RANK and
    WORLD_SIZE if these are not given here. It is torch's meeting: a process group of the program may use the same
    address, before or after.

    Raises:
        RuntimeError: It was called before; ranks do not come; or the arguments make no sense (a ValueError, too).
        TypeError: The backend or the options are of another class than torch's.
    """
    if find_agent() is not None:
        raise RuntimeError("RPC is already initialized")
    if not re.fullmatch(r"[A-Za-z0-9_:-]{1,127}", name):
        raise ArgumentError(f"a worker name must have at most 127 letters, digits, '-', '_' and ':', not {name!r}")
    options = rpc_backend_options or TensorPipeRpcBackendOptions()
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    if not isinstance(options, TensorPipeRpcBackendOptions):
        raise TypeError(
            "Could not infer backend for options: `rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, "
            f"not a {type(options).__name__}"
        )
    timeout = seconds(options.rpc_timeout) or _FOREVER_S
    comm, store = _meet(options.init_method, rank, world_size or -1)
    try:
        with as_in_torch():
            agent = _TorchAgent(comm, name, timeout, True, (), options.num_worker_threads)
    except BaseException:
        comm.close()
        raise
    set_agent(agent)
    # Rank 0 serves the store.
    _made[agent] = comm, store


def _meet(init_method: str, rank: int, world_size: int) -> tuple[Communicator, dist.Store]:
    """Join through torch's store, as a process group does, under a separate name: so both may use one address."""
    limit = timedelta(seconds=TIMEOUT_S)
    store, rank, size = next(dist.rendezvous(init_method, rank, world_size, timeout=limit))
    name = f"unisono/rpc {next(_numbers)}"
    return meet(dist.PrefixStore(name, store), rank, size, TIMEOUT_S, GroupOptions()).comm, store


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End this rank's calls.

    Args:
        graceful: Serve on until all ranks have called this, and no call is under way.
        timeout: Seconds to wait for that; 0 for no limit.
    """
    agent = current_agent()
    comm, _store = _made.pop(agent, (None, None))
    try:
        rpc.shutdown(graceful, timeout or None)
    finally:
        if comm is not None:
            comm.close()
