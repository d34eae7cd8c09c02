"""Daemon threads that are kept for the next task: for waits that cannot be interrupted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Crew"]

_IDLE_S = 5.0


class Crew:
    """Runs each task at once, on a thread that is free or on a new one. Threads end when idle for 5 s.

    Not a `ThreadPoolExecutor`: that one has a limit, behind which waits could wait for each other,
    and joins its threads when the interpreter ends, which a wait without end would prevent.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0

    def run(self, task: Callable[[], None]) -> None:
        """Start a task; it must handle its own errors."""
        with self._lock:
            free = self._free > 0
            if free:
                self._free -= 1
        if free:
            self._tasks.put(task)
        else:
            threading.Thread(target=self._work, args=(task,), name=self._name, daemon=True).start()

    def _work(self, task: Callable[[], None]) -> None:
        while True:
            task()
            del task
            with self._lock:
                self._free += 1
            try:
                task = self._tasks.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._free > 0:
                        self._free -= 1
                        return
                # Every free thread has been promised a task: this one's is on its way.
                task = self._tasks.get()
