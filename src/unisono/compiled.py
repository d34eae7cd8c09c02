"""What is compiled, where a compiler was at hand; without it all works in Python, and slower."""

from __future__ import annotations

import hashlib
import os
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["NO_EXTENSIONS", "PLAIN", "compiled", "native", "part"]

C = TypeVar("C", bound=type)

NO_EXTENSIONS = "UNISONO_NO_EXTENSIONS"
"""The variable of the environment that keeps to Python, if it says anything."""

_SOURCES = Path(__file__).parents[1] / "native"
"""In a checkout; an installed package has none."""


_INTERFACE = 12
"""As in src/compiled/module.c."""

PLAIN: dict[str, type] = {}
"""The classes of Python that others may stand in for, by name."""


def compiled(plain: C) -> C:
    """The compiled class of the same name, if there is one, in the place of this one."""
    PLAIN[plain.__name__] = plain
    found: C = part(plain.__name__) or plain
    return found


def part(name: str) -> Any:
    """What is compiled under this name, for gradients; None if nothing is, or if it is not wanted."""
    return getattr(_module("unisono._compiled", "INTERFACE", _INTERFACE), name, None)


@cache
def native() -> ModuleType | None:
    """The native core of shared memory, unless it was built from other sources than those beside it."""
    return _module("unisono._native", "BUILD", _digest() if _SOURCES.is_dir() else None)


@cache
def _module(name: str, mark: str, wanted: object) -> ModuleType | None:
    if os.environ.get(NO_EXTENSIONS):
        return None
    try:
        module = import_module(name)
    except ImportError:
        return None
    if wanted is not None and getattr(module, mark, None) != wanted:
        warnings.warn(f"{name} was built from other sources and is left out; run `make install`", stacklevel=2)
        return None
    return module


def _digest() -> str:
    """Of the sources, as setup.py computes it."""
    content = b"".join(path.read_bytes() for path in sorted(_SOURCES.glob("*.[ch]pp")))
    return hashlib.sha256(content).hexdigest()[:16]
