"""Calls between ranks: run functions on another rank, hold references to its objects, train across ranks.

    @un.rpc.expose
    def add(x, y): return x + y

    agent = un.rpc.init(comm, name="worker0")
    un.rpc.rpc_sync("worker1", add, args=(torch.ones(2), 3))
    un.rpc.shutdown()

The functions of `unisono.rpc` have the same names as in torch's RPC. Values are sent without pickle, functions are sent
by name, and only exposed functions can be called.
"""

from unisono.rpc import autograd
from unisono.rpc.agent import Agent, get_worker_info, init, shutdown
from unisono.rpc.client import remote, rpc_async, rpc_sync
from unisono.rpc.exported import NotExposedError, async_execution, expose
from unisono.rpc.optimizer import DistributedOptimizer
from unisono.rpc.protocol import WorkerInfo
from unisono.rpc.remote_errors import RemoteError
from unisono.rpc.rref import RRef
from unisono.rpc.server import cancelled

__all__ = [
    "Agent",
    "DistributedOptimizer",
    "NotExposedError",
    "RRef",
    "RemoteError",
    "WorkerInfo",
    "async_execution",
    "autograd",
    "cancelled",
    "expose",
    "get_worker_info",
    "init",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
