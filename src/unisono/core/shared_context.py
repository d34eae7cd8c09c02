"""Context that many share: entered once, however many use it, and left when the last of them leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

__all__ = ["Replacement", "SharedContext", "replaced"]

Replacement = tuple[Any, str, Any]
"""Where an attribute is, its name, and its value for the time of a context."""


class SharedContext:
    """Context that is entered by the first of its users, in whatever thread, and left by the last one.

    Args:
        make: Returns the context, each time that it is to be entered.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._inside = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._inside.enter_context(self._make())
            self._users += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._inside.close()

    def renew_lock(self) -> None:
        """Release it in a process that was forked: the thread that held it may not exist there."""
        self._lock = threading.Lock()


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Context in which attributes have other values; what others have set meanwhile is left alone."""
    before = [(owner, name, value, getattr(owner, name)) for owner, name, value in replacements]
    try:
        for owner, name, value, _ in before:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value, old in before:
            # A context that began before this one may have ended first, and have restored what it found.
            if getattr(owner, name) is value:
                setattr(owner, name, old)
