"""Thread pool for calls of other ranks that may take long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

__all__ = ["Workers"]

_IDLE_S = 5.0
_STUCK_S = 0.02
"""Time without an end of a task, while tasks are queued, after which the running ones may be waiting for these."""
_NOT_HERE = nullcontext()


class Workers:
    """Runs tasks in order of arrival, at most `most` at a time; tasks waiting for another rank do not count.

    Because waiting tasks do not count, calls that call back, at any depth, cannot exhaust the threads. A task that
    waits in a way not visible here (for a lock, or in torch's own code) does count; so when tasks are queued and none
    has ended for a while, one more thread is admitted.

    Args:
        name: Name of the threads.
        most: Maximum number of tasks running concurrently.
        prepare: Called first in each new thread.
    """

    def __init__(self, name: str, most: int, prepare: Callable[[], object]) -> None:
        self._name, self._most, self._prepare = name, most, prepare
        self._tasks: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._available = threading.Condition(self._lock)
        self._running = self._idle = self._ended = self._further = 0
        self._watched = False
        self._working: set[int] = set()
        self._closed = False

    def run(self, task: Callable[[], object]) -> None:
        """Run a task soon; it handles its own errors."""
        with self._lock:
            self._tasks.append(task)
            self._start_threads()

    def not_counted(self) -> AbstractContextManager[object]:
        """Context in which this thread waits for another rank."""
        return self._aside() if threading.get_ident() in self._working else _NOT_HERE

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with self._lock:
            self._running -= 1
            self._start_threads()
        here = threading.get_ident()
        self._working.discard(here)
        try:
            yield
        finally:
            self._working.add(here)
            with self._lock:
                # May exceed the limit by one for a while: a started task is not stopped.
                self._running += 1

    def busy(self) -> bool:
        """Return whether any task is running or queued."""
        with self._lock:
            return bool(self._tasks) or self._running > 0

    def close(self) -> None:
        """Start no more tasks."""
        with self._lock:
            self._closed = True
            self._tasks.clear()
            self._available.notify_all()

    def _start_threads(self) -> None:
        """Ensure that a thread takes the first task, if one more may run. Call with the lock held."""
        if not self._tasks or self._closed:
            return
        if self._running >= self._most + self._further:
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name=self._name, daemon=True).start()
        elif self._idle:
            self._available.notify()
        else:
            self._idle += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _watch(self) -> None:
        """While tasks are queued, admit one more whenever none has ended for some time."""
        while True:
            seen = self._ended
            time.sleep(_STUCK_S)
            with self._lock:
                if not self._tasks or self._closed:
                    self._watched = False
                    return
                if self._ended == seen:
                    self._further += 1
                    self._start_threads()

    def _work(self) -> None:
        self._prepare()
        here = threading.get_ident()
        while (task := self._next()) is not None:
            self._working.add(here)
            try:
                task()
            finally:
                self._working.discard(here)
                del task
                with self._lock:
                    self._running -= 1
                    self._idle += 1
                    self._ended += 1
                    if self._running < self._most:
                        self._further = 0

    def _next(self) -> Callable[[], object] | None:
        """Return the next task; None when there has been none for a while. The caller counts as idle."""
        with self._lock:
            while not self._tasks or self._running >= self._most + self._further:
                if self._closed or not self._available.wait(_IDLE_S):
                    self._idle -= 1
                    # A task may have arrived while the time ran out.
                    self._start_threads()
                    return None
            self._idle -= 1
            self._running += 1
            task = self._tasks.popleft()
            self._start_threads()
            return task
