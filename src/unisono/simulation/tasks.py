"""One thread of a simulated program: when it may run, and what it waits for."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.simulation.scheduler import Scheduler

__all__ = ["Task", "Wait", "as_task", "here", "unpatched", "waiting"]

Wait = Callable[[], str]
"""What is waited for, in words: put together only if somebody asks."""


class Task:
    """A thread that runs only while it holds the baton.

    Attributes:
        name: For the trace.
        rank: Of the process that it would belong to; None for what belongs to no rank.
        main: Whether it runs a rank's program, without which the simulation is over.
        ident: The thread's number, once it has run.
        gate: Opened to hand it the baton. A real lock.
        blocked: Whether it waits for a wake or a time.
        woken: How its last wait ended: by a wake, or at its time.
        number: Of its waits, so that the end of an earlier one is not taken for that of this one.
        pending: What is to be raised where it waits.
        waits: What it waits for, innermost last.
        hasty: How many of these end at their time, however long that is.
        polls: How often it has looked, since it last let others run.
        children: How many threads it has started.
        joiners: Who waits for its end.
        done: Whether it has ended.
        thread: Its thread.
    """

    def __init__(self, scheduler: Scheduler, name: str, rank: int | None, main: bool) -> None:
        self.scheduler, self.name, self.rank, self.main = scheduler, name, rank, main
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
    """The task that this thread is; None outside of simulations."""
    return _here.task


@contextmanager
def as_task(task: Task | None) -> Iterator[None]:
    """This thread is that task."""
    before, _here.task = _here.task, task
    try:
        yield
    finally:
        _here.task = before


@contextmanager
def unpatched() -> Iterator[None]:
    """For a moment this thread is no part of its simulation: clocks, locks and waits are real."""
    with as_task(None):
        yield


@contextmanager
def waiting(what: Wait, *, hasty: bool = False) -> Iterator[None]:
    """Say what the waits in here are for; does nothing outside of simulations.

    Args:
        what: Puts it in words.
        hasty: They end at their time, and a deadlock is no deadlock before.
    """
    task = here()
    if task is None:
        yield
        return
    task.waits.append(what)
    task.hasty += hasty
    try:
        yield
    finally:
        task.waits.pop()
        task.hasty -= hasty
