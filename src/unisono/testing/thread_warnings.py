"""Per-rank warning filters and records, for ranks that are threads of one process."""

from __future__ import annotations

import threading
import warnings
from collections import UserList
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from unisono.core.shared_context import SharedContext

__all__ = ["warnings_by_thread"]

_NAMES = ("filters", "showwarning", "_showwarnmsg_impl")
"""Attributes of the module `warnings` that `warnings.catch_warnings` replaces, and restores on exit."""
_process: dict[str, Any] = {}
"""Values of these attributes for threads that have not replaced them."""
_thread = threading.local()


def _of_thread(name: str) -> Any:
    """Return a property that is local to each thread that sets it."""

    def get(_: object) -> Any:
        return vars(_thread).get(name, _process[name])

    def put(_: object, value: Any) -> None:
        setattr(_thread, name, value)

    return property(get, put)


def _call_of_thread(name: str) -> Any:
    """Return a function that forwards calls to the current thread's version of a function in `warnings`."""

    def call(*args: Any) -> Any:
        return getattr(warnings, name)(*args)

    return call


_Module: Any = type("_Module", (ModuleType,), {name: _of_thread(name) for name in _NAMES})
_Filters: Any = type("_Filters", (UserList,), {"data": _of_thread("filters"), "__init__": lambda self: None})


@contextmanager
def _replaced() -> Iterator[None]:
    # C code and other modules read the names in `_NAMES` as attributes of `warnings`, and so get the properties of
    # `_Module`. Functions in `warnings` read these names from the module's dictionary, so replace them there as well.
    module: Any = warnings
    _process.update((name, vars(module)[name]) for name in _NAMES)
    try:
        module.__class__ = _Module
        vars(module).update({name: _call_of_thread(name) for name in _NAMES}, filters=_Filters())
        yield
    finally:
        module.__class__ = ModuleType
        vars(module).update(_process)


warnings_by_thread = SharedContext(_replaced)
"""Context in which threads that use `catch_warnings` have their own filters and records of warnings.

Without it, `catch_warnings` affects all threads: a test that expects a warning on several ranks could miss a rank's own
warning, or see the warning of another rank.
"""
