"""Collectives of one group, one at a time and in the order of their calls, whatever threads call them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from unisono.crew import Crew
from unisono.work import Completion

__all__ = ["Line"]

Job = Callable[[], object]


@dataclass(slots=True)
class _Task:
    job: Job
    # No limit here: every job ends by a timeout of its own.
    done: Completion

    def perform(self) -> None:
        error: BaseException | None = None
        try:
            self.job()
        except BaseException as raised:
            error = raised
        self.done.complete(error)


class Line:
    """Jobs wait in line. Who comes to an empty line and wants to wait anyway does its job itself.

    Otherwise a thread does them, made when needed. Callbacks of a job that has ended run on that thread too, and
    what they call is done at once, before all that waits: so it has the same place in the order on every rank.
    """

    def __init__(self, name: str) -> None:
        self._crew = Crew(name)
        self._lock = threading.Lock()
        self._waiting: deque[_Task] = deque()
        self._busy = False
        self._driver: int | None = None

    def run(self, job: Job) -> None:
        """Do a job, after those before it; raise its error."""
        if self._driver == threading.get_ident():
            job()
            return
        with self._lock:
            free = not self._busy
            self._busy = True
            if not free:
                self._waiting.append(task := _new(job))
        if not free:
            task.done.wait()
            return
        try:
            job()
        finally:
            self._pass_on()

    def start(self, job: Job) -> Completion:
        """Have a job done; return at once."""
        task = _new(job)
        if self._driver == threading.get_ident():
            task.perform()
            return task.done
        with self._lock:
            self._waiting.append(task)
            free = not self._busy
            self._busy = True
        if free:
            self._crew.run(self._drive)
        return task.done

    def finish(self) -> None:
        """Return when all that waits now is done."""
        self.run(lambda: None)

    def _pass_on(self) -> None:
        with self._lock:
            self._busy = bool(self._waiting)
        if self._busy:
            self._crew.run(self._drive)

    def _drive(self) -> None:
        self._driver = threading.get_ident()
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy, self._driver = False, None
                    return
                task = self._waiting.popleft()
            task.perform()


def _new(job: Job) -> _Task:
    return _Task(job, Completion(threading.TIMEOUT_MAX))
