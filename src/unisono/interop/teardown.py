"""Departure of a rank from a torch group: on shutdown, or when the last reference is dropped."""

from __future__ import annotations

import threading

from unisono.communicator import Communicator
from unisono.control.process_exit import close_at_exit
from unisono.core.threads import spawn_thread
from unisono.interop.progress_thread import Progress
from unisono.interop.serial_queue import SerialQueue

__all__ = ["Leaving"]

_FINISH_WITHIN_S = 30.0
"""Long enough for a collective that others still need, short enough for one that they will never join."""
_AT_EXIT_S = 5.0


class Leaving:
    """The end of a group. It knows nothing of the group, and so outlives it.

    Ranks may be threads of one process: then the end of a rank closes no connection, by which the others would notice.
    So a group that is dropped is left in the background.
    """

    def __init__(self, queue: SerialQueue, progress: Progress, comm: Communicator) -> None:
        self._queue, self._progress, self._comm = queue, progress, comm
        self._dropped = False
        self._over = threading.Event()
        close_at_exit(self)

    def leave(self, timeout_s: float = _FINISH_WITHIN_S) -> None:
        """Complete pending operations, and notify the other ranks. Idempotent."""
        try:
            self._queue.finish(min(timeout_s, _FINISH_WITHIN_S))
            self._progress.close()
            self._comm.close()
        finally:
            self._over.set()

    def drop(self) -> None:
        """Leave in the background. Takes no lock: a finalizer calls it."""
        self._dropped = True
        spawn_thread(self.leave, "unisono end of a torch group")

    def on_process_exit(self, error: BaseException | None) -> None:
        """Wait, when the process ends, for a departure in the background."""
        if self._dropped:
            self._over.wait(_AT_EXIT_S)
