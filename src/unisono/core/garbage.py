"""Suspension of garbage collection, and references that do not prevent it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["no_collection", "weak_method"]


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn off the cyclic garbage collector if it is on.

    Example:
        >>> import gc
        >>> with no_collection():
        ...     gc.isenabled()
        False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def weak_method(method: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls a method as long as its object exists, and does not keep the object alive.

    A post-accumulate-grad hook must be such a function if its object refers to the parameter: the garbage collector
    cannot see torch's reference to the hook, so the parameter would never be freed. The object must be kept alive by
    tensor hooks or module hooks, whose references the collector does see.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call
