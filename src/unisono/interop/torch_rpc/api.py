"""Functions that start RPC, call other ranks and shut RPC down, with torch's signatures."""

from __future__ import annotations

import enum
import itertools
import re
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono import rpc
from unisono.communicator import Communicator
from unisono.interop.from_store import meet
from unisono.interop.options import GroupOptions
from unisono.interop.torch_rpc.constants import (
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
    UNSET_RPC_TIMEOUT,
    ArgumentError,
    as_in_torch,
    seconds,
)
from unisono.interop.torch_rpc.reference import RRef
from unisono.launcher.api import TIMEOUT_S
from unisono.rpc.context import Peers, current_agent, find_agent, set_agent

__all__ = [
    "BackendType",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


class BackendType(enum.Enum):
    """Torch's RPC backends; `init_rpc` accepts any of them, but always uses unisono's own backend."""

    TENSORPIPE = "TENSORPIPE"


class RpcBackendOptions:
    """Rendezvous address, and default timeout of RPC calls.

    Args:
        rpc_timeout: Timeout in seconds; 0 for no limit.
        init_method: As for `torch.distributed.init_process_group`: "env://", "tcp://host:port", "file:///path".
    """

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = "env://") -> None:
        if rpc_timeout < 0:
            raise ArgumentError(f"rpc_timeout must be a number of seconds, or 0 for no limit, not {rpc_timeout!r}")
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The base class's options, plus the number of functions that may run concurrently.

    Args:
        num_worker_threads: Maximum number of functions that this rank runs concurrently for other ranks.
        rpc_timeout: As for `RpcBackendOptions`.
        init_method: As for `RpcBackendOptions`.
        device_maps: Accepted, but tensors always arrive on the CPU.
        devices: Accepted, but has no effect.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = "env://",
        device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
        devices: Sequence[Any] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        if num_worker_threads < 1:
            raise ArgumentError(f"num_worker_threads must be at least 1, not {num_worker_threads!r}")
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[Any, Any]] = {}
        self.devices: list[Any] = list(devices or [])
        for to, mapped in (device_maps or {}).items():
            self.set_device_map(to, mapped)

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Warn that `device_map` has no effect: tensors are sent through the CPU, and always arrive on the CPU."""
        warnings.warn("unisono's calls carry tensors to the CPU of the other rank; move them there", stacklevel=2)
        self.device_maps.setdefault(to, {}).update(device_map)

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Store the devices, which have no effect."""
        self.devices = list(devices)


_FOREVER_S = 3.0e8
# Communicator and store of each agent. As in torch's RPC, they are global: the agent owns neither of them, and
# `shutdown` has no parameter for them.
_made: weakref.WeakKeyDictionary[Peers, tuple[Communicator, dist.Store]] = weakref.WeakKeyDictionary()
# The counter is global, so that each `init_rpc` uses a new name, even in a store that an earlier `init_rpc` used.
_numbers = itertools.count()


class _TorchAgent(rpc.Agent):
    """Agent that returns references of this package's class `RRef`, whose methods have torch's signatures."""

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
    """Start RPC on this rank, so that ranks can call each other's functions.

    Every rank calls `init_rpc`, with a unique name. The options' `init_method` defines the rendezvous. The default,
    "env://", reads MASTER_ADDR and MASTER_PORT from the environment, and also RANK and WORLD_SIZE unless they are
    passed as arguments. Because `init_rpc` uses torch's own rendezvous, the program may also create a process group at
    the same address.

    Raises:
        RuntimeError: `init_rpc` was called before, some ranks did not join, or the arguments are invalid (in this case,
            the error is also a ValueError).
        TypeError: `backend` is not a `BackendType`, or `rpc_backend_options` is not a `TensorPipeRpcBackendOptions`.
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
    # Keep the store alive: rank 0 serves it to the other ranks.
    _made[agent] = comm, store


def _meet(init_method: str, rank: int, world_size: int) -> tuple[Communicator, dist.Store]:
    """Join through torch's store, with a separate key prefix so that a process group may use the same address."""
    limit = timedelta(seconds=TIMEOUT_S)
    store, rank, size = next(dist.rendezvous(init_method, rank, world_size, timeout=limit))
    name = f"unisono/rpc {next(_numbers)}"
    return meet(dist.PrefixStore(name, store), rank, size, TIMEOUT_S, GroupOptions()).comm, store


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Shut down RPC on this rank.

    Args:
        graceful: Whether to keep serving until all ranks have called `shutdown` and no call is in flight.
        timeout: Maximum duration of the graceful shutdown in seconds; 0 for no limit.
    """
    agent = current_agent()
    comm, _store = _made.pop(agent, (None, None))
    try:
        rpc.shutdown(graceful, timeout or None)
    finally:
        if comm is not None:
            comm.close()


_To = str | int | rpc.WorkerInfo
_Function = Callable[..., Any]
_Arguments = Sequence[Any] | None
_Named = Mapping[str, Any] | None


def rpc_sync(to: _To, func: _Function, args: _Arguments = None, kwargs: _Named = None, timeout: float = -1.0) -> Any:
    """Call a function on a rank, and return its result. `timeout`: seconds; -1 for the default, 0 for no limit."""
    with as_in_torch():
        return rpc.rpc_sync(to, _checked(func), args or (), kwargs, seconds(timeout))


def rpc_async(
    to: _To, func: _Function, args: _Arguments = None, kwargs: _Named = None, timeout: float = UNSET_RPC_TIMEOUT
) -> torch.futures.Future[Any]:
    """Call a function as `rpc_sync` does, but return a future immediately."""
    with as_in_torch():
        return rpc.rpc_async(to, _checked(func), args or (), kwargs, seconds(timeout))


def remote(
    to: _To, func: _Function, args: _Arguments = None, kwargs: _Named = None, timeout: float = UNSET_RPC_TIMEOUT
) -> rpc.RRef[Any]:
    """Call a function as `rpc_sync` does, but keep the result on rank `to`, and return a reference immediately."""
    with as_in_torch():
        return rpc.remote(to, _checked(func), args or (), kwargs, seconds(timeout))


def get_worker_info(worker_name: str | None = None) -> rpc.WorkerInfo:
    """Return the name and number of a rank (this rank if None)."""
    with as_in_torch():
        return rpc.get_worker_info(worker_name)


def _checked(func: _Function) -> _Function:
    if not callable(func):
        raise TypeError(f"function must be callable, not a {type(func).__name__}")
    return func
