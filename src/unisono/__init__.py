"""unisono: distributed primitives for PyTorch that plug into your own training loop.

    import unisono as un
    comm = un.init()
    un.average_gradients(model, comm)

Every name loads on first use, so importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono.core.compiled_code import leave_out_of_graphs

if TYPE_CHECKING:
    from unisono import (
        algorithms,
        autograd,
        checkpoint,
        compression,
        data,
        debugger,
        elastic,
        engines,
        errors,
        gradients,
        interop,
        pool,
        rpc,
        sharding,
        testing,
        transports,
        utils,
    )
    from unisono.comm.tracing import trace
    from unisono.communicator import Communicator
    from unisono.core.types import Recv, ReduceOp, Send, Work
    from unisono.debugger import breakpoint  # noqa: A004  # as Python's, for all ranks
    from unisono.diagnostics.metrics import Metrics
    from unisono.elastic import stop
    from unisono.elastic.admission import join
    from unisono.errors import CommError
    from unisono.gradients import GradientAverager, agree_step, average_gradients, broadcast_parameters
    from unisono.launcher.api import init, launch
    from unisono.launcher.simulated import simulate
    from unisono.pool import Pool
    from unisono.recording import record, replay

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "Communicator",
    "GradientAverager",
    "Metrics",
    "Pool",
    "Recv",
    "ReduceOp",
    "Send",
    "Work",
    "agree_step",
    "algorithms",
    "autograd",
    "average_gradients",
    "breakpoint",
    "broadcast_parameters",
    "checkpoint",
    "compression",
    "data",
    "debugger",
    "elastic",
    "engines",
    "errors",
    "gradients",
    "init",
    "interop",
    "join",
    "launch",
    "pool",
    "record",
    "replay",
    "rpc",
    "sharding",
    "simulate",
    "stop",
    "testing",
    "trace",
    "transports",
    "utils",
]

_HOME = {
    "CommError": "unisono.errors",
    "Communicator": "unisono.communicator",
    "GradientAverager": "unisono.gradients",
    "Metrics": "unisono.diagnostics.metrics",
    "Pool": "unisono.pool",
    "Recv": "unisono.core.types",
    "ReduceOp": "unisono.core.types",
    "Send": "unisono.core.types",
    "Work": "unisono.core.types",
    "agree_step": "unisono.gradients",
    "average_gradients": "unisono.gradients",
    "breakpoint": "unisono.debugger",
    "broadcast_parameters": "unisono.gradients",
    "init": "unisono.launcher.api",
    "join": "unisono.elastic.admission",
    "launch": "unisono.launcher.api",
    "record": "unisono.recording",
    "replay": "unisono.recording",
    "simulate": "unisono.launcher.simulated",
    "trace": "unisono.comm.tracing",
}
_PACKAGES = {
    "algorithms": "unisono.algorithms",
    "autograd": "unisono.autograd",
    "checkpoint": "unisono.checkpoint",
    "compression": "unisono.compression",
    "data": "unisono.data",
    "debugger": "unisono.debugger",
    "elastic": "unisono.elastic",
    "engines": "unisono.engines",
    "errors": "unisono.errors",
    "gradients": "unisono.gradients",
    "interop": "unisono.interop",
    "pool": "unisono.pool",
    "rpc": "unisono.rpc",
    "sharding": "unisono.sharding",
    "stop": "unisono.elastic.stop",
    "testing": "unisono.testing",
    "transports": "unisono.transports",
    "utils": "unisono.utils",
}

leave_out_of_graphs()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(_PACKAGES[name])
    else:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
