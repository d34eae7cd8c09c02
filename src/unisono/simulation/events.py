"""Events in virtual time: ends of waits, and scheduled actions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random

from unisono.simulation.tasks import Task

__all__ = ["NS", "Action", "Event", "EventQueue", "Timeout", "Timer", "nanoseconds"]

NS = 1_000_000_000
"""Nanoseconds per second."""

Action = Callable[[], object]


def nanoseconds(seconds: float) -> int:
    """Convert to nanoseconds, from 0 to a century. Rounds up so that a waiter never wakes with time remaining."""
    return math.ceil(min(max(seconds, 0.0), 3.2e9) * NS)


class Event(ABC):
    """Something scheduled at a virtual time.

    Attributes:
        patient: Whether it is only the end of a wait with the default patience.
    """

    patient = False

    def live(self) -> bool:
        """Return whether it is still due to happen."""
        return True

    @abstractmethod
    def fire(self, wake: Callable[[Task], object]) -> None:
        """Run the event."""


class Timeout(Event):
    """The end of a task's patience."""

    def __init__(self, task: Task, patient: bool) -> None:
        self._task = task
        self._number = task.number
        self.patient = patient

    def live(self) -> bool:
        return self._task.blocked and self._task.number == self._number

    def fire(self, wake: Callable[[Task], object]) -> None:
        wake(self._task)
        self._task.woken = False


class Timer(Event):
    """Action that a task runs when it is due."""

    def __init__(self, doer: Task, due: list[Action], action: Action) -> None:
        self._doer = doer
        self._due = due
        self._action = action

    def fire(self, wake: Callable[[Task], object]) -> None:
        self._due.append(self._action)
        wake(self._doer)


_Entry = tuple[int, float, int, Event]


class EventQueue:
    """Events ordered by time; ties are ordered by the seed."""

    def __init__(self, random: Random) -> None:
        self._random, self._count = random, count()
        # Ends of patience are stored separately.
        self._patient: list[_Entry] = []
        self._others: list[_Entry] = []

    def add(self, when: int, event: Event) -> None:
        """Schedule an event at this time, in nanoseconds."""
        heap = self._patient if event.patient else self._others
        heappush(heap, (when, self._random.random(), next(self._count), event))

    def next(self) -> tuple[int, Event] | None:
        """Remove and return the first event; None if only ends of patience are left."""
        for heap in (self._patient, self._others):
            while heap and not heap[0][-1].live():
                heappop(heap)
        if not self._others:
            return None
        heap = self._patient if self._patient and self._patient[0] < self._others[0] else self._others
        when, _, _, event = heappop(heap)
        return when, event
