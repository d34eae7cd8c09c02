"""Options of `init_rpc`, in torch's classes."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.interop.torch_rpc.constants import DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from unisono.interop.torch_rpc.errors import ArgumentError

__all__ = ["BackendType", "RpcBackendOptions", "TensorPipeRpcBackendOptions"]


class BackendType(enum.Enum):
    """Torch's backends of RPC. Whichever is requested, unisono's own runs."""

    TENSORPIPE = "TENSORPIPE"


class RpcBackendOptions:
    """Rendezvous address of the ranks, and timeout of calls.

    Args:
        rpc_timeout: Seconds; 0 for no limit.
        init_method: As for `torch.distributed.init_process_group`: "env://", "tcp://host:port", "file:///path".
    """

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = "env://") -> None:
        if rpc_timeout < 0:
            raise ArgumentError(f"rpc_timeout must be a number of seconds, or 0 for no limit, not {rpc_timeout!r}")
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The same, and the number of functions that may run concurrently.

    Args:
        num_worker_threads: Number of functions called by other ranks that run here concurrently.
        rpc_timeout: As above.
        init_method: As above.
        device_maps: Accepted; tensors arrive on the CPU whatever it says.
        devices: Likewise.
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
        """Accepted, with a warning: tensors travel by way of the CPU, and arrive there."""
        warnings.warn("unisono's calls carry tensors to the CPU of the other rank; move them there", stacklevel=2)
        self.device_maps.setdefault(to, {}).update(device_map)

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Accepted; it has no effect."""
        self.devices = list(devices)
