"""Engines that are created in one thread while a debugger looks for those to hold in another."""

from __future__ import annotations

import threading
from collections import deque

from waiting import repeated

from unisono.core.flight_recorder import Activity
from unisono.core.group import Group
from unisono.core.hold import Hold


class OpenEngine:
    """Engine that is always open."""

    def __init__(self, owner: int) -> None:
        self.owner: int | None = None
        self.activity = Activity(Group.world(0, 1))
        self.activity.owner = owner


def test_engines_may_be_added_during_a_look_at_them() -> None:
    hold = Hold()
    mine = [OpenEngine(threading.get_ident()) for _ in range(1000)]
    for engine in mine:
        hold.add(engine)
    made: deque[OpenEngine] = deque(maxlen=20)

    def add() -> None:
        # The owner is a thread other than the one below.
        made.append(OpenEngine(0))
        hold.add(made[-1])

    with repeated(add):
        for _ in range(500):
            assert hold.engines_of(threading.get_ident()) == mine
