"""One thread's turn at receiving messages, until its deputy takes over."""

from __future__ import annotations

import math
import threading
import time
from enum import Enum

from unisono.core.threads import AutoResetEvent
from unisono.rpc.workers import Task, run_task

__all__ = ["Turn", "TurnState"]

_TICK_S = 2e-3
"""The receiving thread is replaced if it runs one function for longer than this time."""
_QUIET_TICKS = 50


class TurnState(Enum):
    """What a thread does during its turn."""

    RECEIVING = "it polls, or waits for messages"
    RUNNING = "it runs a function, and receives nothing"
    REPLACED = "it still runs the function, after which it exits; the deputy receives"
    ENDED = "it has stopped receiving, because the agent was closed"


class Turn:
    """One thread's turn as the receiving thread, observed by a second thread, the deputy.

    At every tick, the deputy checks whether the same function is still running, because setting a timer for each
    function would cost more than most functions. If no function has run for a while, the deputy sleeps, and the next
    function wakes it.

    | state | a function begins | it ends | it runs for a tick | `close` |
    |---|---|---|---|---|
    | receiving | running | | | ended |
    | running | | receiving | replaced | |
    | replaced | | | | |
    | ended | | | | |
    """

    def __init__(self) -> None:
        # Guards all fields. The receiving thread and the deputy must agree on two things: whether a function ended in
        # time or its thread was replaced, and whether the thread that begins a function must wake the deputy.
        self._lock = threading.Lock()
        self._state = TurnState.RECEIVING
        self._runs = 0
        self._asleep = True
        self._alarm = AutoResetEvent()

    # -- the receiving thread ------------------------------------------------------------------
    def run(self, task: Task) -> bool:
        """Run a function in this thread; return False if the deputy has taken over, so that this thread must exit."""
        with self._lock:
            self._state = TurnState.RUNNING
            self._runs += 1
            wakes = self._asleep
            self._asleep = False
        if wakes:
            self._alarm.set()
        run_task(task)
        with self._lock:
            if self._state is TurnState.REPLACED:
                return False
            self._state = TurnState.RECEIVING
            return True

    def close(self) -> None:
        """End the turn, which also makes the deputy exit."""
        with self._lock:
            if self._state is TurnState.RECEIVING:
                self._state = TurnState.ENDED
        self._alarm.set()

    # -- the deputy ----------------------------------------------------------------------------
    def overruns(self) -> bool:
        """Wait; return True when the deputy has to take over, or False when the turn has ended."""
        while True:
            self._alarm.wait(math.inf)
            quiet = 0
            while quiet <= _QUIET_TICKS:
                seen = self._runs
                time.sleep(_TICK_S)
                with self._lock:
                    if self._state is TurnState.ENDED:
                        return False
                    if self._runs != seen:
                        quiet = 0
                    elif self._state is TurnState.RUNNING:
                        # No function began during this tick, so the running function began before the tick.
                        self._state = TurnState.REPLACED
                        return True
                    else:
                        quiet += 1
                        self._asleep = quiet > _QUIET_TICKS
