"""Native core, built if a compiler was available; backends shm and tcp need it."""

from __future__ import annotations

import hashlib
import os
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

__all__ = ["NO_EXTENSIONS", "core_build", "native"]

NO_EXTENSIONS = "UNISONO_NO_EXTENSIONS"
"""Environment variable that disables the native extensions if it is not empty."""

_SOURCES = Path(__file__).parents[2] / "native"
"""In a checkout; an installed package has none."""


@cache
def native() -> ModuleType | None:
    """Return the native core, unless it was built from other sources than those of this checkout."""
    if os.environ.get(NO_EXTENSIONS):
        return None
    try:
        module = import_module("unisono._native")
    except ImportError:
        return None
    if _SOURCES.is_dir() and getattr(module, "BUILD", None) != _digest():
        warnings.warn("unisono._native was built from other sources and is ignored; run `make install`", stacklevel=2)
        return None
    return module


def core_build() -> str:
    """Return what identifies the native core; "" without one."""
    module = native()
    return "" if module is None else str(module.BUILD)


def _digest() -> str:
    """Return the digest of the sources, as setup.py computes it."""
    content = b"".join(path.read_bytes() for path in sorted(_SOURCES.rglob("*.[ch]pp")))
    return hashlib.sha256(content).hexdigest()[:16]
