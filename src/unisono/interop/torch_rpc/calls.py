"""Calls with torch's signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unisono import rpc
from unisono.interop.torch_rpc.constants import UNSET_RPC_TIMEOUT, seconds
from unisono.interop.torch_rpc.errors import as_in_torch

__all__ = ["get_worker_info", "remote", "rpc_async", "rpc_sync"]

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
    """The same as `rpc_sync`, but return a future immediately."""
    with as_in_torch():
        return rpc.rpc_async(to, _checked(func), args or (), kwargs, seconds(timeout))


def remote(
    to: _To, func: _Function, args: _Arguments = None, kwargs: _Named = None, timeout: float = UNSET_RPC_TIMEOUT
) -> rpc.RRef[Any]:
    """The same as `rpc_sync`, but leave the result on its rank: return a reference to it immediately."""
    with as_in_torch():
        return rpc.remote(to, _checked(func), args or (), kwargs, seconds(timeout))


def get_worker_info(worker_name: str | None = None) -> rpc.WorkerInfo:
    """Name and number of a rank; of this one if None."""
    with as_in_torch():
        return rpc.get_worker_info(worker_name)


def _checked(func: _Function) -> _Function:
    if not callable(func):
        raise TypeError(f"function must be callable, not a {type(func).__name__}")
    return func
