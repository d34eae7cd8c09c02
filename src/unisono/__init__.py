"""unisono: distributed primitives for PyTorch that plug into your own training loop.

    import unisono as un
    comm = un.init()
    un.average_gradients(model, comm)

Sub-packages (`un.data`, `un.testing`, ...) load when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from unisono.communicator import Communicator
from unisono.errors import CommError
from unisono.gradients import average_gradients, broadcast_parameters
from unisono.launch import init, launch
from unisono.types import ReduceOp, Work
from unisono.wrappers.trace import trace

__version__ = "0.1.0"

_LAZY = ("data", "errors", "schedules", "testing", "transports")

__all__ = [
    "CommError",
    "Communicator",
    "ReduceOp",
    "Work",
    "average_gradients",
    "broadcast_parameters",
    "data",
    "errors",
    "init",
    "launch",
    "schedules",
    "testing",
    "trace",
    "transports",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"unisono.{name}")
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")
