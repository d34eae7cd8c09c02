"""Packages whose names load on first use, so that a program loads only what it uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["load_on_use"]


def load_on_use(
    package: str, homes: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` for a package. `dir` lists the package's `__all__`.

    Args:
        package: `__name__` of the package.
        homes: For each module, the names that the module defines for the package, separated by spaces.
        modules: Modules that are attributes of the package, each under the last part of its name.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}
    inside = {module.rpartition(".")[2]: module for module in modules}

    def load(name: str) -> Any:
        if name in home:
            value = getattr(importlib.import_module(home[name]), name)
        elif name in inside:
            value = importlib.import_module(inside[name])
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # From now on, Python finds this name without calling `load`.
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: list(sys.modules[package].__all__)
