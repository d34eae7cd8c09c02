"""What open handles do when their process ends by itself: leave in peace, or tell the error that ended it."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Protocol

from unisono.errors import CommError

__all__ = ["CLOSE_HANDLES", "CLOSE_SERVERS", "Handle", "close_all", "close_at_exit", "when_process_ends"]

# multiprocessing's finalizers run in its child processes too, which heed no atexit. Higher ones run first.
CLOSE_HANDLES, CLOSE_SERVERS = 20, 10


class Handle(Protocol):
    """What is to be closed before the process ends."""

    def give_up(self, error: BaseException | None) -> None:
        """Close; if an error ends the process, tell the other ranks."""
        ...


_handles: weakref.WeakSet[Handle] = weakref.WeakSet()
_registered: set[tuple[int, int]] = set()


def when_process_ends(function: Callable[[], object], priority: int) -> None:
    """Call this at the end of the process, once, however often it is asked for."""
    if (os.getpid(), priority) not in _registered:
        _registered.add((os.getpid(), priority))
        Finalize(None, function, exitpriority=priority)


def close_at_exit(handle: Handle) -> None:
    """Have it closed at the end of the process, if it is still there."""
    _handles.add(handle)
    when_process_ends(close_all, CLOSE_HANDLES)


def close_all() -> None:
    """Close all handles that are still open."""
    error = _what_ends_the_process()
    for handle in list(_handles):
        with contextlib.suppress(CommError, OSError):
            handle.give_up(error)


def _what_ends_the_process() -> BaseException | None:
    """The exception that nobody caught, if there is one."""
    # A child of multiprocessing is here while the exception passes; a script, after it was printed.
    error = sys.exception()
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error
