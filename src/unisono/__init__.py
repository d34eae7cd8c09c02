"""unisono: distributed primitives for PyTorch that plug into your own training loop.

    import unisono as un
    comm = un.init()
    un.average_gradients(model, comm)

Every name loads on first use, so importing the package is cheap.
"""

from typing import TYPE_CHECKING

from unisono.core.compiled_code import leave_out_of_graphs
from unisono.core.lazy import load_on_use

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

leave_out_of_graphs()

__getattr__, __dir__ = load_on_use(
    __name__,
    {
        "unisono.comm.tracing": "trace",
        "unisono.communicator": "Communicator",
        "unisono.core.types": "Recv ReduceOp Send Work",
        "unisono.debugger": "breakpoint",
        "unisono.diagnostics.metrics": "Metrics",
        "unisono.elastic.admission": "join",
        "unisono.errors": "CommError",
        "unisono.gradients": "GradientAverager agree_step average_gradients broadcast_parameters",
        "unisono.launcher.api": "init launch",
        "unisono.launcher.simulated": "simulate",
        "unisono.pool": "Pool",
        "unisono.recording": "record replay",
    },
    [
        "unisono.algorithms",
        "unisono.autograd",
        "unisono.checkpoint",
        "unisono.compression",
        "unisono.data",
        "unisono.debugger",
        "unisono.elastic",
        "unisono.engines",
        "unisono.errors",
        "unisono.gradients",
        "unisono.interop",
        "unisono.pool",
        "unisono.rpc",
        "unisono.sharding",
        "unisono.elastic.stop",
        "unisono.testing",
        "unisono.transports",
        "unisono.utils",
    ],
)
