"""Pickles functions by value, for processes that cannot import them. Only for trusted peers."""

from __future__ import annotations

import io
import threading
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

__all__ = ["FunctionPickler", "dumps"]

_FILE_NAME = 10
"""Position of the file's name among the arguments of `CodeType`."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Reduce a code object with the name of its file, which cloudpickle 3.1.3 and later omit."""
    build, arguments = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return build, (*arguments[:_FILE_NAME], code.co_filename, *arguments[_FILE_NAME + 1 :])


class FunctionPickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler that sends functions and classes by value where needed. Errors on peers name the caller's lines."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, cloudpickle.CloudPickler.dispatch_table)


_registry = threading.RLock()
"""Held while a module is registered: cloudpickle has one registry for the process, in which several threads launch."""


@contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Register a module whose functions and classes are sent by value. A registration by the user is left in place."""
    if module is None:
        yield
        return
    with _registry:
        registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if not registered:
                cloudpickle.unregister_pickle_by_value(module)


def dumps(value: object, module: ModuleType | None = None, pickler: type[FunctionPickler] = FunctionPickler) -> bytes:
    """Return the pickle of a value, with its functions by value where needed.

    Args:
        value: The value.
        module: A module whose functions and classes are also sent by value, since peers cannot import it.
        pickler: The class to pickle with.

    Example:
        >>> import pickle
        >>> three = lambda: 3
        >>> copy = pickle.loads(dumps(three))
        >>> copy(), copy.__code__.co_filename == three.__code__.co_filename
        (3, True)
    """
    file = io.BytesIO()
    with _by_value(module):
        pickler(file).dump(value)
    return file.getvalue()
