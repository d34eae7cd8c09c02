"""Threads that run tasks, at most a given number at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

__all__ = ["Task", "Workers", "run_task"]

Task = Callable[[], object]
"""What remains to be done for a message once its handler has returned. It may block, and run users' functions."""

_log = logging.getLogger(__name__)

_IDLE_S = 5.0
_STUCK_S = 0.02
"""If tasks are queued and no task ends for this long, the running tasks may be waiting for queued tasks."""
_NOT_HERE = nullcontext()


def run_task(task: Task) -> None:
    """Run a task. Tasks report their own errors; an error that escapes is logged, and must not end the thread."""
    try:
        task()
    except KeyboardInterrupt:
        # Only the main thread gets a Ctrl-C. It runs tasks only while its caller waits for a reply, and this caller
        # must not miss the Ctrl-C.
        raise
    except BaseException:
        # Catch even `SystemExit`, which would end the thread silently: no more messages would be received, or a worker
        # would be counted as idle forever.
        _log.exception("handling a message failed")


class Workers:
    """Runs tasks in order of arrival, at most `most` at a time, not counting tasks that wait for another rank.

    Because waiting tasks do not count, nested callbacks of any depth cannot exhaust the threads. A task that waits in a
    way invisible to this class (for a lock, or inside torch) does count. Therefore, if tasks are queued and no task has
    finished for a while, one more thread is admitted.

    Args:
        name: Name of the threads.
        most: Maximum number of tasks running concurrently.
        initializer: Function called at the start of each new thread.
    """

    def __init__(self, name: str, most: int, initializer: Callable[[], object]) -> None:
        self._name = name
        self._most = most
        self._initializer = initializer
        # The lock guards all fields below except `_counted`, and is never held while a task runs.
        self._lock = threading.Lock()
        self._available = threading.Condition(self._lock)
        self._tasks: deque[Task] = deque()
        # The current limit on running tasks, which is `most` plus one for each time that all running tasks seemed
        # stuck.
        self._limit = most
        self._running = 0
        # Number of threads without a task, including threads that are being started. A thread is counted until it takes
        # a task or ends.
        self._idle = 0
        self._ended = 0
        self._watched = False
        self._closed = False
        # Threads whose task counts as running. Each thread adds and removes only itself, so no lock is needed.
        self._counted: set[int] = set()

    def start_thread(self, life: Callable[[], None]) -> None:
        """Start a daemon thread that calls the initializer and then `life`."""

        def live() -> None:
            self._initializer()
            life()

        threading.Thread(target=live, name=self._name, daemon=True).start()

    def run(self, task: Task) -> None:
        """Queue a task."""
        with self._lock:
            self._tasks.append(task)
            self._start_threads()

    def not_counted(self) -> AbstractContextManager[object]:
        """Return a context in which this thread may wait for another rank without being counted."""
        # Don't subtract a thread that is not counted: either it is not a worker, or an outer wait has already
        # subtracted it.
        return self._aside() if threading.get_ident() in self._counted else _NOT_HERE

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with self._lock:
            self._running -= 1
            # Start a queued task, because the reply may depend on it: the other rank may have called back.
            self._start_threads()
        here = threading.get_ident()
        self._counted.discard(here)
        try:
            yield
        finally:
            self._counted.add(here)
            with self._lock:
                # The limit may be exceeded for a while, because a running task cannot be paused.
                self._running += 1

    def close(self) -> None:
        """Start no more tasks."""
        with self._lock:
            self._closed = True
            self._tasks.clear()
            self._available.notify_all()

    def _start_threads(self) -> None:
        """Make sure that a thread takes the first task, if one more task may run. The caller must hold the lock."""
        if not self._tasks or self._closed:
            return
        if self._running >= self._limit:
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name=self._name, daemon=True).start()
        elif self._idle:
            self._available.notify()
        else:
            self._idle += 1
            self.start_thread(self._work)

    def _watch(self) -> None:
        """While tasks are queued, admit one more thread whenever no task has finished for some time."""
        while True:
            seen = self._ended
            time.sleep(_STUCK_S)
            with self._lock:
                if not self._tasks or self._closed:
                    self._watched = False
                    return
                if self._ended == seen:
                    self._limit += 1
                    self._start_threads()

    def _work(self) -> None:
        here = threading.get_ident()
        while (task := self._next()) is not None:
            self._counted.add(here)
            run_task(task)
            self._counted.discard(here)
            # Drop the task before waiting for the next one, because the task may hold the last reference to large
            # arguments.
            del task
            with self._lock:
                self._running -= 1
                self._idle += 1
                self._ended += 1
                if self._running < self._most:
                    # Tasks are no longer stuck, so the usual limit applies again.
                    self._limit = self._most

    def _next(self) -> Task | None:
        """Return the next task; None if no task arrives for a while. The caller must be counted as idle."""
        with self._lock:
            while not self._tasks or self._running >= self._limit:
                if self._closed or not self._available.wait(_IDLE_S):
                    self._idle -= 1
                    # A task may have arrived just as the time ran out.
                    self._start_threads()
                    return None
            self._idle -= 1
            self._running += 1
            task = self._tasks.popleft()
            # `_start_threads` wakes only one thread, so each thread that takes a task provides a thread for the next
            # task.
            self._start_threads()
            return task
