"""The API of `torch.distributed.rpc`, implemented with `unisono.rpc`, for programs written for torch's RPC.

    import unisono.interop.torch_rpc as rpc     # in place of torch.distributed.rpc
    from unisono.interop.torch_rpc import (
        DistributedOptimizer,                   # of torch.distributed.optim
        RemoteModule,                           # of torch.distributed.nn
        dist_autograd,                          # torch.distributed.autograd
    )

As in torch, ranks trust each other: a rank may call any importable function on another rank, and values that have no
other encoding are pickled. `docs/how-to/torch-rpc.md` lists the differences from torch's RPC.
"""

from unisono.interop.torch_rpc import constants, dist_autograd, functions
from unisono.interop.torch_rpc.api import (
    BackendType,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    get_worker_info,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from unisono.interop.torch_rpc.dist_autograd import DistributedOptimizer
from unisono.interop.torch_rpc.reference import PyRRef, RRef
from unisono.interop.torch_rpc.remote_module import RemoteModule
from unisono.rpc import WorkerInfo

__all__ = [
    "BackendType",
    "DistributedOptimizer",
    "PyRRef",
    "RRef",
    "RemoteModule",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "constants",
    "dist_autograd",
    "functions",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
