"""Check that the native core is built. Without the core, shm and tcp are unavailable, and "auto" chooses gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from unisono.host.distribution import source
from unisono.host.native import NO_EXTENSIONS, native
from unisono.tools.doctor.examination import Finding, Target, info, ok, optional

__all__ = ["ORDER", "check"]

ORDER = 11
_SOURCES = "/path/to/unisono"
_COST = "backends shm and tcp need it, and 'auto' takes the slower gloo instead"


def check(_target: Target) -> Iterator[Finding]:
    """Try to load the native core."""
    if native() is not None:
        yield ok("the native core, which backends shm and tcp need, is installed")
    elif os.environ.get(NO_EXTENSIONS):
        yield info(
            f"{NO_EXTENSIONS} is set: {_COST}",
            f"unset {NO_EXTENSIONS}",
        )
    else:
        yield optional(
            f"the native core is missing: {_COST}",
            f"{sys.executable} -m pip install --force-reinstall --no-deps --no-cache-dir {source() or _SOURCES}   "
            "# needs a C++ compiler and Python's headers",
        )
