"""What a forkserver has in memory before the first rank starts: all that ranks would import slowly."""

from __future__ import annotations

import importlib

__all__ = ["PRELOADED"]

PRELOADED = (
    "unisono.gradients",
    "unisono.launching.rank",
    "unisono.transports.thread",
    "unisono.transports.torch",
)

for _name in PRELOADED:
    importlib.import_module(_name)
