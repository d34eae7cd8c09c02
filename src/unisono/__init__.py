"""unisono: distributed primitives for PyTorch that plug into your own training loop.

    import unisono as un
    comm = un.init()
    un.average_gradients(model, comm)

Every name loads when it is first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono import checkpoint, compression, data, errors, gradients, interop, rpc, testing
    from unisono import recovery as recovery
    from unisono import schedules as schedules
    from unisono import transports as transports
    from unisono.communicator import Communicator
    from unisono.errors import CommError
    from unisono.gradients import GradientAverager, average_gradients, broadcast_parameters
    from unisono.joining import join
    from unisono.launching.simulated import simulate
    from unisono.startup import init, launch
    from unisono.types import ReduceOp, Work
    from unisono.wrappers.trace import trace

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "Communicator",
    "GradientAverager",
    "ReduceOp",
    "Work",
    "average_gradients",
    "broadcast_parameters",
    "checkpoint",
    "compression",
    "data",
    "errors",
    "gradients",
    "init",
    "interop",
    "join",
    "launch",
    "rpc",
    "simulate",
    "testing",
    "trace",
]

_HOME = {
    "CommError": "unisono.errors",
    "Communicator": "unisono.communicator",
    "GradientAverager": "unisono.gradients",
    "ReduceOp": "unisono.types",
    "Work": "unisono.types",
    "average_gradients": "unisono.gradients",
    "broadcast_parameters": "unisono.gradients",
    "init": "unisono.startup",
    "join": "unisono.joining",
    "launch": "unisono.startup",
    "simulate": "unisono.launching.simulated",
    "trace": "unisono.wrappers.trace",
}
_PACKAGES = (
    "checkpoint",
    "compression",
    "data",
    "errors",
    "gradients",
    "interop",
    "recovery",
    "rpc",
    "schedules",
    "testing",
    "transports",
)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"unisono.{name}")
    else:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
