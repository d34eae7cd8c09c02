"""Exit hooks, which close a process's open handles, and report the error, if any, that ends the process."""

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

# multiprocessing's finalizers also run in its child processes, which ignore atexit. Finalizers of higher priority run
# first.
CLOSE_HANDLES = 20
CLOSE_SERVERS = 10
_GRACE_S = 2.0
# IDs of processes whose launcher determines the first failure from reports, not from the order of exits.
_end_at_once: set[int] = set()


class ExitHandler(Protocol):
    """A resource to close before the process ends."""

    def on_process_exit(self, error: BaseException | None) -> None:
        """Close this resource; if an error ends the process, report the error to the other ranks."""
        ...


# Keyed by the registering process, because a forked child inherits its parent's handles, and must not close them.
_handles: weakref.WeakValueDictionary[tuple[int, int], ExitHandler] = weakref.WeakValueDictionary()
# Global, because handles close in the reverse of the order in which they were made.
_numbers = itertools.count()
# Keyed by process, like the handles, because a forked child registers functions of its own.
_registered: set[tuple[int, int]] = set()


BACKGROUND_SAVES: list[Callable[[], object]] = []
"""Functions that wait for background work, and raise its error; checkpoints, in a higher layer, add their own."""


def when_process_ends(function: Callable[[], object], priority: int) -> None:
    """Register a function to run once at process exit. Idempotent."""
    if (os.getpid(), priority) not in _registered:
        _registered.add((os.getpid(), priority))
        Finalize(None, function, exitpriority=priority)


def close_at_exit(handle: ExitHandler) -> None:
    """Register a handle to be closed at process exit, if it still exists."""
    _handles[os.getpid(), next(_numbers)] = handle
    when_process_ends(_take_leave, CLOSE_HANDLES)


def _take_leave() -> None:
    error = close_all()
    if isinstance(error, PeerLostError | AbortedError) and os.getpid() not in _end_at_once:
        # Launchers blame the process that exits first, so let the failed process exit first.
        time.sleep(_GRACE_S)


def end_at_once() -> None:
    """Let this process exit without delay after another process's failure.

    For launchers that determine the first failure from reports, not from the order of exits.
    """
    _end_at_once.add(os.getpid())


def exit_with_children() -> NoReturn:
    """Exit immediately, along with everything that this rank has started, because its launcher is gone."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        # This rank leads a process group, to which its children belong.
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def raise_failed_saves() -> None:
    """Raise the error of a failed background save, unless this rank's program has already received it."""
    for raise_failed in BACKGROUND_SAVES:
        raise_failed()


def close_all() -> BaseException | None:
    """Close all handles that are still open; return the error that ends the process, which they have reported."""
    error = _what_ends_the_process()
    # Close the newest handle first, because a handle may depend on older ones. `valuerefs` copies in one step;
    # iterating would raise if a daemon thread registered a handle meanwhile.
    alive = [(ref.key, handle) for ref in _handles.valuerefs() if (handle := ref()) is not None]
    own = [(number, handle) for (process, number), handle in alive if process == os.getpid()]
    for _, handle in sorted(own, reverse=True):
        with contextlib.suppress(CommError, OSError):
            handle.on_process_exit(error)
    return error


def _what_ends_the_process() -> BaseException | None:
    """Return the uncaught exception that ends the process, if there is one."""
    # In a multiprocessing child, the exception is still being handled here; in a script, it has been printed, and is in
    # `sys.last_value`.
    error = sys.exception()
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error
