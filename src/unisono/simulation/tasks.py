"""One thread of a simulated program: when it may run, and what it waits for."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Task", "TaskScheduler", "Wait", "as_task", "here", "unpatched", "waiting"]

Wait = Callable[[], str]
"""Description of what is waited for; built only on request."""


class TaskScheduler(Protocol):
    """Calls of `Scheduler`, which documents them, for the code that runs in its tasks."""

    now: int

    def admit(self, task: Task) -> None: ...
    def at(self, when: int, action: Callable[[], object]) -> None: ...
    def before_lock(self) -> None: ...
    def block(self, deadline: int | None = None) -> bool: ...
    def chance(self) -> float: ...
    def choose(self, among: int) -> int: ...
    def live(self, task: Task, run: Callable[[], object]) -> None: ...
    def note(self, text: str) -> None: ...
    def of_rank(self, rank: int) -> list[Task]: ...
    def pause(self) -> None: ...
    def poll(self) -> None: ...
    def sleep(self, seconds: float) -> None: ...
    def throw(self, task: Task, error: BaseException) -> None: ...
    def wake(self, task: Task) -> None: ...


class Task:
    """A thread that runs only while it holds the baton.

    Attributes:
        scheduler: Its scheduler.
        name: For the trace.
        rank: Rank of the process that it would belong to; None if it belongs to no rank.
        main: Whether it runs a rank's program; the simulation is over when none is left.
        ident: Thread identifier, once it has run.
        gate: Opened to pass it the baton. A real lock.
        blocked: Whether it waits for a wake-up or a time.
        woken: Whether its last wait ended by a wake-up rather than at its time.
        number: Number of its current wait, so that the end of an earlier wait is not mistaken for the end of this one.
        pending: Exception to raise where it waits.
        waits: What it waits for, innermost last.
        hasty: How many of these end at their time, however long that is.
        polls: Number of polls since it last yielded.
        children: Number of threads it has started.
        joiners: Tasks that wait for its end.
        done: Whether it has ended.
        thread: Its thread.
    """

    def __init__(self, scheduler: TaskScheduler, name: str, rank: int | None, main: bool) -> None:
        self.scheduler = scheduler
        self.name = name
        self.rank = rank
        self.main = main
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.thread: threading.Thread | None = None
        self.ident: int | None = None
        self.done = self.blocked = self.woken = False
        self.number = self.polls = self.hasty = self.children = 0
        self.pending: BaseException | None = None
        self.waits: list[Wait] = []
        self.joiners: list[Task] = []


class _Here(threading.local):
    task: Task | None = None


_here = _Here()


def here() -> Task | None:
    """Return the task of this thread; None outside of simulations."""
    return _here.task


@contextmanager
def as_task(task: Task | None) -> Iterator[None]:
    """Context in which this thread is the given task."""
    before = _here.task
    _here.task = task
    try:
        yield
    finally:
        _here.task = before


@contextmanager
def unpatched() -> Iterator[None]:
    """Context in which this thread is outside its simulation: clocks, locks and waits are real."""
    with as_task(None):
        yield


@contextmanager
def waiting(describe: Wait, *, hasty: bool = False) -> Iterator[None]:
    """Describe the waits in this context; does nothing outside of simulations.

    Args:
        describe: Returns the description.
        hasty: Whether they end at their time; no deadlock is reported before that.
    """
    task = here()
    if task is None:
        yield
        return
    task.waits.append(describe)
    task.hasty += hasty
    try:
        yield
    finally:
        task.waits.pop()
        task.hasty -= hasty
