"""Shared context: entered when its first user enters, and exited when the last one exits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

__all__ = ["Replacement", "SharedContext", "replaced"]

Replacement = tuple[Any, str, Any]
"""Object, name of its attribute, and the attribute's value within a context."""


class SharedContext:
    """Context that is entered by its first user, in any thread, and exited by its last.

    Args:
        make: Function that returns a new context each time it is entered.
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
        """Replace the lock in a forked process, where the thread that held it may not exist."""
        self._lock = threading.Lock()


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Return a context in which attributes have the given values.

    An attribute that other code has set during the context is not restored on exit.
    """
    before = [(owner, name, value, getattr(owner, name)) for owner, name, value in replacements]
    try:
        for owner, name, value, _ in before:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value, old in before:
            # Restore only attributes that still have this context's value: a context that began earlier may have ended
            # first, and already restored an older value.
            if getattr(owner, name) is value:
                setattr(owner, name, old)
