"""Registry of entries by name: modules of a package, entry points of other packages, or registered objects."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

__all__ = ["Registry", "entry_points_of", "unknown_name"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Registry of a package's modules by name. Adding a file adds a name; no list needs updating.

    Args:
        kind: Noun for an entry in error messages ("transport").
        package: Package whose modules are the entries.
        attribute: Name of the module attribute that is the entry; if None, the module is the entry.
        aliases: Additional names for modules of the package.
        group: Entry-point group for other packages; the package's name if None.
        helpers: Modules of the package that are not entries.

    Example:
        >>> collectives = Registry("all_reduce algorithm", "unisono.collectives.algorithms.all_reduce")
        >>> "ring" in collectives.names()
        True
        >>> collectives["rang"]
        Traceback (most recent call last):
        ...
        ValueError: unknown all_reduce algorithm 'rang'; known: ...
    """

    def __init__(
        self,
        kind: str,
        package: str,
        attribute: str | None = None,
        aliases: dict[str, str] | None = None,
        *,
        group: str | None = None,
        helpers: Collection[str] = (),
    ) -> None:
        self.kind = kind
        self._package = package
        self._attribute = attribute
        self._aliases = aliases or {}
        self._group = group or package
        self._hidden = {*self._aliases.values(), *helpers}
        self._registered: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        """Add an entry for this process; a duplicate name is an error."""
        if name in self:
            raise ValueError(f"the {self.kind} {name!r} exists already; choose another name")
        self._registered[name] = entry
        return entry

    def unregister(self, name: str) -> None:
        """Remove an entry that `register` added."""
        del self._registered[name]

    def names(self) -> list[str]:
        """All known names, sorted. Listing the names imports the package, but not its modules."""
        return sorted({*self._modules, *self._aliases, *self._foreign, *self._registered})

    def __contains__(self, name: object) -> bool:
        return name in self._registered or name in self._aliases or name in self._modules or name in self._foreign

    def __getitem__(self, name: str) -> T:
        if name in self._registered:
            return self._registered[name]
        if name in self._aliases or name in self._modules:
            module = importlib.import_module(f"{self._package}.{self._aliases.get(name, name)}")
            return cast(T, getattr(module, self._attribute) if self._attribute else module)
        if name in self._foreign:
            return cast(T, self._foreign[name].load())
        raise ValueError(unknown_name(self.kind, name, self.names()))

    def summary(self, name: str) -> str:
        """Return the first line of an entry's docstring. Imports no module of the package, except for an alias."""
        if name in self._modules and name not in self._registered:
            spec = importlib.util.find_spec(f"{self._package}.{name}")
            assert spec is not None
            assert spec.origin is not None
            text = ast.get_docstring(ast.parse(Path(spec.origin).read_bytes()))
        else:
            text = self[name].__doc__
        return (text or "").partition("\n")[0]

    def attributes(self, package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
        """Return the functions `__getattr__` and `__dir__` for a package whose attributes include all entries.

        Args:
            package: `__name__` of the package.
        """

        def load(name: str) -> T:
            if name.startswith("_") or name not in self:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            return self[name]

        return load, lambda: sorted({*sys.modules[package].__all__, *self.names()})

    @property
    def _modules(self) -> tuple[str, ...]:
        """Modules and subpackages, except helpers and those available only under aliases."""
        files = _files(tuple(importlib.import_module(self._package).__path__))
        return tuple(name for name in files if name not in self._hidden)

    @property
    def _foreign(self) -> dict[str, EntryPoint]:
        return entry_points_of(self._group)


def unknown_name(kind: str, name: str, known: Collection[str]) -> str:
    """Return the message for an unknown name, with all known names and a close match, if there is one.

    Args:
        kind: Noun for the entry ("transport").
        name: The unknown name.
        known: All known names.

    Example:
        >>> unknown_name("transport", "threads", ["gloo", "thread"])
        "unknown transport 'threads'; known: gloo, thread; did you mean 'thread'?"
    """
    message = f"unknown {kind} {name!r}; known: {', '.join(known)}"
    nearest = get_close_matches(str(name), known, 1)
    return f"{message}; did you mean {nearest[0]!r}?" if nearest else message


# Cached, because a search for files and entry points takes milliseconds, and every collective looks up its algorithm.
@cache
def _files(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(m.name for m in pkgutil.iter_modules(folders) if not m.name.startswith("_"))


@cache
def entry_points_of(group: str) -> dict[str, EntryPoint]:
    """Return the entry points that installed packages declare in a group, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}
