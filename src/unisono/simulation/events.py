"""What will happen at which virtual time: ends of waits, and things to be done."""

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
"""Nanoseconds in a second."""

Action = Callable[[], object]


def nanoseconds(seconds: float) -> int:
    """Not below 0, and a century at most. Rounded up: who waits for the rest of a time must not find a rest again."""
    return math.ceil(min(max(seconds, 0.0), 3.2e9) * NS)


class Event(ABC):
    """What will happen at some time.

    Attributes:
        patient: Whether it is only the end of a wait of the default patience.
    """

    patient = False

    def live(self) -> bool:
        """Whether it still will."""
        return True

    @abstractmethod
    def fire(self, wake: Callable[[Task], object]) -> None:
        """Have it happen."""


class Timeout(Event):
    """The end of a task's patience."""

    def __init__(self, task: Task, patient: bool) -> None:
        self._task, self._number, self.patient = task, task.number, patient

    def live(self) -> bool:
        return self._task.blocked and self._task.number == self._number

    def fire(self, wake: Callable[[Task], object]) -> None:
        wake(self._task)
        self._task.woken = False


class Timer(Event):
    """Something that a task does when it is due."""

    def __init__(self, doer: Task, due: list[Action], action: Action) -> None:
        self._doer, self._due, self._action = doer, due, action

    def fire(self, wake: Callable[[Task], object]) -> None:
        self._due.append(self._action)
        wake(self._doer)


_Entry = tuple[int, float, int, Event]


class EventQueue:
    """Events in the order of their times; those of the same time in any order, by the seed."""

    def __init__(self, random: Random) -> None:
        self._random, self._count = random, count()
        # Ends of patience apart from all else.
        self._patient: list[_Entry] = []
        self._others: list[_Entry] = []

    def add(self, when: int, event: Event) -> None:
        """It will happen at this time, in nanoseconds."""
        heap = self._patient if event.patient else self._others
        heappush(heap, (when, self._random.random(), next(self._count), event))

    def next(self) -> tuple[int, Event] | None:
        """The first event, which is taken out; None if there are only ends of patience left."""
        for heap in (self._patient, self._others):
            while heap and not heap[0][-1].live():
                heappop(heap)
        if not self._others:
            return None
        heap = self._patient if self._patient and self._patient[0] < self._others[0] else self._others
        when, _, _, event = heappop(heap)
        return when, event
