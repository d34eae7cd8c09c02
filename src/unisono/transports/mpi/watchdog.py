"""Watchdog for MPI collectives: usually, only aborting the job ends a collective in which a rank has stopped."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

from unisono.core import clock
from unisono.host.mpi_library import has_ulfm
from unisono.transports.mpi.communicators import MpiCommunicators

__all__ = ["Watchdog"]

_EVERY_S = 0.1
_GRACE_S = 3.0

# At most one thread watches all communicators of the process; the thread exits when the last communicator is gone.
_watched: weakref.WeakSet[Watchdog] = weakref.WeakSet()
_patrols: list[threading.Thread] = []
# Guards `_watched` and `_patrols`.
_lock = threading.Lock()


class Watchdog:
    """Watchdog for blocking MPI calls. Before each call, set the communicators' `deadline`; after the call, clear it.

    A daemon thread checks the deadline ten times a second. When a call is overdue, the thread breaks the communicator,
    as an abort does; this ends the call if MPI can revoke communicators. If the call has not ended 3 s later, the
    thread aborts the job. With an MPI that survives rank failures, the thread terminates only this rank instead of the
    job.

    Args:
        comms: The communicators.
        give_up: Function that breaks the communicator after a timeout.
    """

    def __init__(self, comms: MpiCommunicators, give_up: Callable[[], object]) -> None:
        self._comms = comms
        self._give_up = give_up
        self._since: float | None = None
        self._is_watched = False

    def arm(self) -> None:
        """Start checking the deadline."""
        if self._is_watched:
            return
        self._is_watched = True
        with _lock:
            _watched.add(self)
            if not any(thread.is_alive() for thread in _patrols):
                _patrols[:] = [threading.Thread(target=_loop, name="unisono MPI watch", daemon=True)]
                _patrols[0].start()

    def look(self) -> None:
        """Check the deadline once. Called by the daemon thread."""
        now = clock.now()
        deadline = self._comms.deadline
        cause = self._comms.broken
        if deadline is None:
            self._since = None
        elif cause is None:
            if now > deadline:
                self._give_up()
        elif self._since is None:
            # Revoke again: the call may have begun just when the communicator broke.
            self._since = now
            self._comms.revoke(cause)
        elif now > self._since + _GRACE_S:
            self._end(cause)

    def _end(self, cause: BaseException) -> None:
        scope = "this rank" if has_ulfm() else "the job"
        sys.stderr.write(f"{cause}\nMPI cannot abort a collective that has begun, so {scope} is ended.\n")
        sys.stderr.flush()
        if has_ulfm():
            os._exit(1)
        self._comms.mpi.COMM_WORLD.Abort(1)


def _loop() -> None:
    """Watch until all communicators are gone. Runs in the daemon thread."""
    while True:
        time.sleep(_EVERY_S)
        with _lock:
            # Copy the set, because other threads may register communicators during the checks.
            watched = list(_watched)
        while watched:
            watched.pop().look()
        with _lock:
            if not _watched:
                _patrols.clear()
                return
