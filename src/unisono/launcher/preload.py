"""Modules that are slow to import, which a forkserver imports before it forks the first rank."""

import gc
import importlib

__all__ = ["PRELOADED"]

PRELOADED = (
    # Packages import the listed modules lazily, so without preloading, every forked rank would import them itself.
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
# Exclude all objects loaded so far from garbage collection: a rank's collector would write to their headers, and so
# copy memory pages that forked ranks share.
gc.freeze()
gc.enable()
