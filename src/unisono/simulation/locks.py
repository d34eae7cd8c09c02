"""The primitive that Python's others are built from: a lock that a task waits for in virtual time."""

from __future__ import annotations

import _thread
from types import TracebackType

from unisono.simulation.events import nanoseconds
from unisono.simulation.tasks import Task, here

__all__ = ["VirtualLock"]


class VirtualLock:
    """Replacement of `threading.Lock`. Threads outside of simulations wait in real time, so it may outlive one."""

    __slots__ = ("_lock", "_tasks")

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._tasks: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = here()
        if task is None:
            return self._lock.acquire(blocking, timeout)
        task.scheduler.before_lock()
        if self._lock.acquire(False):
            return True
        if not blocking:
            task.scheduler.poll()
            return False
        deadline = None if timeout < 0 else task.scheduler.now + nanoseconds(timeout)
        while True:
            self._tasks.append(task)
            try:
                woken = task.scheduler.block(deadline)
            finally:
                if task in self._tasks:
                    self._tasks.remove(task)
            if self._lock.acquire(False):
                return True
            if not woken:
                return False

    def release(self) -> None:
        self._lock.release()
        if self._tasks:
            # A lock guarantees no order among its waiters.
            scheduler = self._tasks[0].scheduler
            scheduler.wake(self._tasks.pop(scheduler.choose(len(self._tasks))))

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock = _thread.allocate_lock()
        self._tasks.clear()
