"""Daemon threads that run tasks (a pool, a serial worker, threads for finalizers), and an event that wakes a thread."""

from __future__ import annotations

import _thread
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["AutoResetEvent", "DaemonThreadPool", "SerialWorker", "refuse_green_threads", "spawn_thread"]

_IDLE_S = 5.0
_GREEN = ("threading", "queue")
"""Modules whose objects must work between system threads."""


def refuse_green_threads() -> None:
    """Raise `RuntimeError` if gevent has replaced threads, or their queues, with coroutines.

    Coroutines share one system thread, so a rank that waits in native code would block all other ranks, and all ranks
    would share the library's per-thread state.
    """
    if "gevent.monkey" in sys.modules and any(map(sys.modules["gevent.monkey"].is_module_patched, _GREEN)):
        raise RuntimeError(
            "gevent has replaced Python's threads or queues by those of coroutines, so ranks cannot be threads in this "
            "process: use ranks that are processes (backend 'shm' or 'tcp'), or gevent.monkey.patch_all(thread=False, "
            "queue=False)"
        )


class AutoResetEvent:
    """Event that wakes one thread, and is cleared when that thread continues.

    The event is a bare lock, the fastest way in Python to wake another thread.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake the waiting thread, or the next thread to wait. Repeated calls wake only one thread."""
        with suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the event is set, and clear it; return False on timeout."""
        return self._lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))


class DaemonThreadPool:
    """Pool that runs each task immediately, on an idle thread or a new one. Threads exit after being idle for 5 s.

    A `ThreadPoolExecutor` would not be suitable: it limits the number of threads, so queued waits could deadlock, and
    it joins its threads at interpreter exit, which an endless wait would block.

    Attributes:
        name: Name of the threads.
    """

    def __init__(self, name: str) -> None:
        self.name: str = name
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0

    def run(self, task: Callable[[], object]) -> None:
        """Start a task; it must handle its own errors."""
        with self._lock:
            free = self._free > 0
            if free:
                self._free -= 1
        if free:
            self._tasks.put(task)
        else:
            threading.Thread(target=self._work, args=(task,), name=self.name, daemon=True).start()

    def _work(self, task: Callable[[], object]) -> None:
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
                # `run` has reserved this thread, so a task for it is about to arrive.
                task = self._tasks.get()


class SerialWorker:
    """Worker that runs tasks in order, on one thread that is created on first use.

    The thread references a task only while running it, so that it does not keep anything alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def run(self, task: Callable[[], None]) -> bool:
        """Queue a task after all earlier tasks; it must handle its own errors.

        Returns False if `end` has been called; the task may then never run.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=_do, args=(self._tasks,), name=self._name, daemon=True)
            self._thread.start()
        self._tasks.put(task)
        # Check this last, so that no call of `end` is missed that the thread may see before the task.
        if self._ended:
            # If this call has started the thread, `end` has not told it to exit.
            self._tasks.put(None)
        return not self._ended

    def end(self) -> None:
        """Make the thread exit after the last task. Takes no lock, so a finalizer may call it."""
        self._ended = True
        if self._thread is not None:
            self._tasks.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread has exited; return immediately if called from a task."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)


def _do(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task


def spawn_thread(task: Callable[[], None], name: str) -> None:
    """Run a task in a new thread, without waiting for its start. For finalizers, whose thread may hold any lock.

    Starting a `threading.Thread` acquires a lock in `threading`, so a bare thread, which holds no locks, starts it.
    """
    _thread.start_new_thread(lambda: threading.Thread(target=task, name=name, daemon=True).start(), ())
