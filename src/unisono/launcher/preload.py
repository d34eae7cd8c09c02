"""Modules that a forkserver imports before the first rank starts: everything that is slow to import."""

from __future__ import annotations

import gc
import importlib

__all__ = ["PRELOADED"]

PRELOADED = (
    # Packages load these lazily; without this list, every forked rank would import them again.
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
# Freeze everything loaded so far, because a visit by a rank's garbage collector would copy the shared pages.
gc.freeze()
gc.enable()
