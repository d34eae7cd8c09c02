"""Pickles functions by value, for processes that cannot import them; only for peers that trust each other."""

from __future__ import annotations

import io
import threading
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

__all__ = ["FunctionPickler", "dumps"]

_FILE_NAME = 10
"""Position of the file name among the arguments of `CodeType`."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Reduce a code object for pickling. Includes its file name, which cloudpickle 3.1.3 and later omit."""
    build, arguments = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return build, (*arguments[:_FILE_NAME], code.co_filename, *arguments[_FILE_NAME + 1 :])


class FunctionPickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler that sends functions and classes by value if needed. Tracebacks on peers show the caller's file names."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, cloudpickle.CloudPickler.dispatch_table)


_registry = threading.RLock()
"""Held while a module is registered: threads that launch at the same time share cloudpickle's registry."""


@contextmanager
def _by_value(module: ModuleType) -> Iterator[None]:
    """Return a context in which a module's functions and classes are sent by value.

    A module that the user has registered with cloudpickle for pickling by value remains registered.
    """
    with _registry:
        registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if not registered:
                cloudpickle.unregister_pickle_by_value(module)


def dumps(value: object, module: ModuleType | None = None, pickler: type[FunctionPickler] = FunctionPickler) -> bytes:
    """Pickle a value. Functions that peers cannot import are pickled by value.

    Args:
        value: The value.
        module: A module whose functions and classes are also sent by value, because peers cannot import it.
        pickler: The pickler class to use.

    Example:
        >>> import pickle
        >>> three = lambda: 3
        >>> copy = pickle.loads(dumps(three))
        >>> copy(), copy.__code__.co_filename == three.__code__.co_filename
        (3, True)
    """
    file = io.BytesIO()
    with nullcontext() if module is None else _by_value(module):
        pickler(file).dump(value)
    return file.getvalue()
