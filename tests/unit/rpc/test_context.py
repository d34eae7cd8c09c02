"""Agents of a process, and the one that threads use which belong to no rank."""

from __future__ import annotations

from collections import deque
from typing import Any

from waiting import repeated

from unisono.rpc.context import find_agent, register


class Agent:
    """Agent that is only looked for."""


def test_agents_may_be_created_while_a_thread_looks_for_one() -> None:
    agents: list[Any] = [Agent() for _ in range(1000)]
    for agent in agents:
        register(agent)
    made: deque[Any] = deque(maxlen=20)

    def add() -> None:
        made.append(Agent())
        register(made[-1])

    with repeated(add):
        for _ in range(500):
            assert find_agent() is None
