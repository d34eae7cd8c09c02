"""Exit hooks for open handles when their process ends by itself: leave cleanly, or report the error that ended it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import NoReturn, Protocol

from unisono.errors import AbortedError, CommError, PeerLostError

__all__ = [
    "BACKGROUND_SAVES",
    "CLOSE_HANDLES",
    "CLOSE_SERVERS",
    "ExitHandler",
    "close_all",
    "close_at_exit",
    "end_at_once",
    "exit_with_children",
    "raise_failed_saves",
    "when_process_ends",
]

# multiprocessing's finalizers run in its child processes too, which heed no atexit. Higher ones run first.
CLOSE_HANDLES = 20
CLOSE_SERVERS = 10
_GRACE_S = 2.0
# Processes whose launcher blames by their reports, and not the one that ends first.
_end_at_once: set[int] = set()


class ExitHandler(Protocol):
    """A resource to close before the process ends."""

    def on_process_exit(self, error: BaseException | None) -> None:
        """Close; if an error ends the process, report it to the other ranks."""
        ...


# By the process that registered them: a forked child has its parent's, and must not close them.
_handles: weakref.WeakValueDictionary[tuple[int, int], ExitHandler] = weakref.WeakValueDictionary()
# Of the process, for the order in which handles were made.
_numbers = itertools.count()
# By process, as the handles: a forked child registers its own.
_registered: set[tuple[int, int]] = set()


BACKGROUND_SAVES: list[Callable[[], object]] = []
"""Functions that wait for what runs in the background, and raise its error; the checkpoints, above, add theirs."""


def when_process_ends(function: Callable[[], object], priority: int) -> None:
    """Register a function to run once at the end of the process. Idempotent."""
    if (os.getpid(), priority) not in _registered:
        _registered.add((os.getpid(), priority))
        Finalize(None, function, exitpriority=priority)


def close_at_exit(handle: ExitHandler) -> None:
    """Register a handle to be closed at the end of the process, if it still exists."""
    _handles[os.getpid(), next(_numbers)] = handle
    when_process_ends(_take_leave, CLOSE_HANDLES)


def _take_leave() -> None:
    error = _what_ends_the_process()
    _close_all(error)
    if isinstance(error, PeerLostError | AbortedError) and os.getpid() not in _end_at_once:
        # Launchers blame the process that ends first, which should be the one that failed.
        time.sleep(_GRACE_S)


def end_at_once() -> None:
    """Do not let this process outlive the one whose failure ends it: the launcher knows by reports who failed first."""
    _end_at_once.add(os.getpid())


def exit_with_children() -> NoReturn:
    """Exit immediately, with all that this rank has started, because its launcher is gone."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        # What this rank has started is in its group.
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def raise_failed_saves() -> None:
    """Raise the error of a checkpoint's save in the background that this rank's program has not seen."""
    for raise_failed in BACKGROUND_SAVES:
        raise_failed()


def close_all() -> None:
    """Close all handles that are still open."""
    _close_all(_what_ends_the_process())


def _close_all(error: BaseException | None) -> None:
    # The last ones first, because they may need earlier ones.
    own = [(number, handle) for (process, number), handle in _handles.items() if process == os.getpid()]
    for _, handle in sorted(own, reverse=True):
        with contextlib.suppress(CommError, OSError):
            handle.on_process_exit(error)


def _what_ends_the_process() -> BaseException | None:
    """Return the uncaught exception, if there is one."""
    # A child of multiprocessing is here while the exception passes; a script, after it was printed.
    error = sys.exception()
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error
