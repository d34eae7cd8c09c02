"""Modules that a forkserver imports before the first rank starts: all that ranks would import slowly."""

from __future__ import annotations

import gc
import importlib

__all__ = ["PRELOADED"]

PRELOADED = (
    # Their packages load names when they are used, which each rank would do by itself.
    "unisono.bootstrap.tcp_store",
    "unisono.checkpoint.loader",
    "unisono.gradients.average",
    "unisono.gradients.averager",
    "unisono.gradients.periodic_averager",
    "unisono.launcher.processes",
    "unisono.transports.tcp",
    "unisono.transports.thread",
    "unisono.transports.torch",
)

gc.disable()
for _name in PRELOADED:
    importlib.import_module(_name)
# What is there now stays. No rank has to look through it for garbage, which would copy the memory they share.
gc.freeze()
gc.enable()
