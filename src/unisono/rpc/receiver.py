"""Receives messages in a dedicated thread; if a function occupies this thread, another thread takes over."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial

from unisono.core import clock
from unisono.core.transport import Mailbox
from unisono.rpc.dispatcher import Dispatcher
from unisono.rpc.turn import Turn
from unisono.rpc.workers import Task, Workers

__all__ = ["Receiver"]

_LINGER_S = 100e-6
"""How long the receiving thread polls after a message before it sleeps."""
_LOOK_S = 2e-3
"""Time between two checks for due tasks under constant load."""
_NAP_S = 0.5


class Receiver:
    """Receives messages, and runs the resulting tasks.

    The receiving thread runs short functions itself: handing every function to a worker made a round trip 1.6 times as
    long on shared memory, and 1.2 times on TCP. Whether a function is short is a guess, so a second thread, the deputy,
    takes over receiving if a function takes longer than expected. Therefore, a function that blocks the receiving
    thread until some message arrives delays that message by only a few milliseconds.

    Args:
        box: The mailbox.
        dispatcher: Dispatcher of the received messages.
        workers: Runs long functions, and starts the threads that receive.
        due: Function called between messages. It returns the time of its next call, on the library's clock, and the
            tasks to run now.
    """

    def __init__(
        self,
        box: Mailbox,
        dispatcher: Dispatcher,
        workers: Workers,
        due: Callable[[], tuple[float, list[Task]]],
    ) -> None:
        self._box = box
        self._dispatcher = dispatcher
        self._workers = workers
        self._due = due
        # Only the thread whose turn it is (see `Turn`) uses this queue. A deputy that takes over continues with the
        # tasks left in it.
        self._todo: deque[tuple[Task, bool]] = deque()
        self._closed = False

    def start(self) -> None:
        """Start receiving."""
        self._workers.start_thread(self._receive)

    def close(self) -> None:
        """Stop receiving; the threads exit by themselves."""
        self._closed = True
        self._box.wake()

    def _stand_by(self, turn: Turn) -> None:
        """Run as a deputy: take over if a function occupies the receiving thread."""
        if turn.overruns():
            self._receive()

    def _receive(self) -> None:
        """Run as a receiving thread."""
        turn = Turn()
        self._workers.start_thread(partial(self._stand_by, turn))
        try:
            self._receive_during(turn)
        finally:
            # Close the turn even after an error, because the deputy would otherwise wait forever.
            turn.close()

    def _receive_during(self, turn: Turn) -> None:
        """Receive until the deputy takes over, or the agent is closed."""
        box = self._box
        quiet_at = look_at = 0.0
        while not self._closed:
            moved = self._dispatcher.poll(self._todo)
            if self._todo and not self._run_tasks(turn):
                return
            now = clock.now()
            if moved and box.eager:
                quiet_at = now + _LINGER_S
            if now > look_at or (not moved and now > quiet_at):
                # Look for lost ranks only after handling messages: a message that has arrived counts, even if its
                # sender has since been lost.
                due, tasks = self._due()
                look_at = now + _LOOK_S
                if tasks:
                    self._todo.extend((task, True) for task in tasks)
                elif not moved and now > quiet_at:
                    box.wait(min(due - now, _NAP_S))
            elif not moved:
                os.sched_yield()

    def _run_tasks(self, turn: Turn) -> bool:
        """Run the queued tasks in order; return False if the deputy has replaced this thread."""
        todo = self._todo
        while todo:
            task, short = todo.popleft()
            if not short:
                self._workers.run(task)
            elif not turn.run(task):
                # Stop, because the deputy now uses the queue and the mailbox.
                return False
        return True
