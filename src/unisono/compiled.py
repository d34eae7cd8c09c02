"""Parts that are compiled where a compiler was at hand. Each stands in for a class of Python, and does what it does."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["NO_EXTENSIONS", "PLAIN", "compiled", "part"]

C = TypeVar("C", bound=type)

NO_EXTENSIONS = "UNISONO_NO_EXTENSIONS"
"""The variable of the environment that keeps to Python, if it says anything."""

_INTERFACE = 11
"""As in src/compiled/module.c."""

PLAIN: dict[str, type] = {}
"""The classes of Python that others may stand in for, by name."""


def compiled(plain: C) -> C:
    """The compiled class of the same name, if there is one, in the place of this one."""
    PLAIN[plain.__name__] = plain
    found: C = part(plain.__name__) or plain
    return found


def part(name: str) -> Any:
    """What is compiled under this name; None if nothing is, or if it is not wanted."""
    return getattr(_module(), name, None)


@cache
def _module() -> ModuleType | None:
    if os.environ.get(NO_EXTENSIONS):
        return None
    try:
        module = import_module("unisono._compiled")
    except ImportError:
        return None
    # One that an older state of the sources has left behind would do other things.
    return module if module.INTERFACE == _INTERFACE else None
