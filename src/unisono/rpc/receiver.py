"""Receiver of the mailbox: one permanent thread, or temporarily a thread that waits for an answer."""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from unisono.core.transport import Envelope, Mailbox
from unisono.errors import CommError
from unisono.rpc.pending_calls import PendingCall
from unisono.rpc.thread_pool import Workers

__all__ = ["Handler", "Receiver", "Task"]

Task = Callable[[], object]
Handler = Callable[[Envelope], tuple[Task, bool] | None]
"""Handles a message; quick. Returns the remaining task, if any, and whether it is short."""

_log = logging.getLogger(__name__)

_LINGER_S = 100e-6
"""Duration of the receiving thread's polls after a message arrived, before it sleeps."""
_SPINS = 30
_POLL_S = 1e-3
"""Duration of the polls of a thread that waits for an answer."""
_TICK_S = 2e-3
"""The receiving thread is replaced if it runs one function for longer than this."""
_QUIET_TICKS = 50
_NAP_S = 0.5


class Receiver:
    """Receives messages from a mailbox, and runs the resulting tasks.

    The receiving thread runs short functions itself: handing them to another thread would take longer. A second
    thread, the deputy, checks whether one of them takes long after all, and then receives instead. So no message
    that a function waits for is delayed by more than a few milliseconds.

    Args:
        box: The mailbox.
        workers: Other threads, which run long functions.
        clock: Called between messages; returns when it is to be called next, on the monotonic clock, and tasks.
        prepare: Called in each new thread first.
        name: Name of the threads.

    Attributes:
        handlers: Handler of each kind of message. Called in order, by one thread at a time.
        ended: Ranks with an end that has been handled, or is about to be: their messages are dropped.
    """

    def __init__(
        self,
        box: Mailbox,
        workers: Workers,
        clock: Callable[[], tuple[float, list[Task]]],
        prepare: Callable[[], object],
        name: str,
    ) -> None:
        self._box, self._workers = box, workers
        self.handlers: dict[int, Handler] = {}
        self.ended: set[int] = set()
        self._clock, self._prepare, self._name = clock, prepare, name
        self._token = threading.Lock()
        self._swap = threading.Lock()
        self._alarm = threading.Semaphore(0)
        self._todo: deque[tuple[Task, bool]] = deque()
        self._generation = 0
        self._runs = 0
        self._running = 0
        self._armed = False
        self._dispatcher = 0
        self.closed = False

    def start(self) -> None:
        """Begin to receive."""
        self._start(self._receive)
        self._start(self._watch)

    def _start(self, life: Callable[[], None]) -> None:
        def live() -> None:
            self._prepare()
            life()

        threading.Thread(target=live, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Stop receiving; the threads end by themselves."""
        self.closed = True
        self._alarm.release()
        self._box.wake()

    @property
    def dispatching(self) -> bool:
        """Return whether this thread is in the middle of a dispatch, during which it must not send."""
        return self._dispatcher == threading.get_ident()

    @property
    def busy(self) -> bool:
        """Return whether the receiving thread runs a function."""
        return self._running > 0

    # -- the receiving thread ------------------------------------------------------------------
    def _receive(self) -> None:
        mine, box = self._generation, self._box
        quiet_at = 0.0
        look_at = 0.0
        while not self.closed and self._generation == mine:
            moved = self._move()
            if self._todo and not self._run_all(mine):
                # The deputy receives now.
                return
            now = time.monotonic()
            if moved and box.eager:
                quiet_at = now + _LINGER_S
            if now > look_at or (not moved and now > quiet_at):
                # Messages already received from a rank count, even if that rank is lost by now: so this follows them.
                due, tasks = self._clock()
                look_at = now + _TICK_S
                if tasks:
                    self._todo.extend((task, True) for task in tasks)
                elif not moved and now > quiet_at:
                    box.wait(min(due - now, _NAP_S))
            elif not moved:
                os.sched_yield()

    def dispatch(self, message: Envelope) -> tuple[Task, bool] | None:
        """Handle one message, in order. Return the remaining task, and whether it is short."""
        if message.peer in self.ended:
            return None
        try:
            return self.handlers[message.head[0]](message)
        except (ValueError, TypeError, LookupError, struct.error) as error:
            # Not a valid message: receive nothing more from this rank.
            invalid = CommError(f"rank {message.peer} sent an invalid message: {error}", peer=message.peer)
            self._box.mark_lost(message.peer, invalid)
            return None

    def _move(self) -> bool:
        """Receive pending messages; return whether there were any."""
        if not self._token.acquire(blocking=False):
            # Another thread polls, and dispatches what it receives.
            return False
        self._dispatcher = threading.get_ident()
        try:
            messages = self._box.poll()
            self._todo.extend(task for message in messages if (task := self.dispatch(message)) is not None)
        finally:
            self._dispatcher = 0
            self._token.release()
        return bool(messages)

    def _run_all(self, mine: int) -> bool:
        """Run the queued tasks in order; False if this thread was replaced meanwhile: its deputy does the rest."""
        todo = self._todo
        while todo:
            task, short = todo.popleft()
            if not short:
                self._workers.run(partial(_safely, task))
            elif not self._run(task, mine):
                return False
        return True

    def _run(self, task: Task, mine: int) -> bool:
        """Run a task here; False if this thread has been replaced meanwhile."""
        self._runs += 1
        self._running = self._runs
        if not self._armed:
            self._armed = True
            self._alarm.release()
        _safely(task)
        with self._swap:
            if self._generation != mine:
                return False
            self._running = 0
        return True

    # -- the deputy ----------------------------------------------------------------------------
    def _watch(self) -> None:
        while not self.closed:
            self._alarm.acquire()
            quiet = 0
            while not self.closed and self._armed:
                seen, total = self._running, self._runs
                time.sleep(_TICK_S)
                if seen and self._replace(seen):
                    self._start(self._watch)
                    return self._receive()
                quiet = 0 if self._runs != total or self._running else quiet + 1
                if quiet > _QUIET_TICKS:
                    self._armed = False
                    # A function that began just now found the deputy still awake.
                    self._armed = self._running > 0

    def _replace(self, seen: int) -> bool:
        """Become the receiving thread, if the other still runs the same function."""
        with self._swap:
            if self._running != seen:
                return False
            self._generation += 1
            self._running = 0
            # The next function wakes the next deputy.
            self._armed = False
        return True

    # -- threads waiting for an answer -----------------------------------------------------------------
    def wait_for_reply(self, call: PendingCall) -> None:
        """Wait until a call has ended or its time is up; poll for its answer meanwhile, if that pays."""
        box, spins = self._box, 0
        if box.eager and call.peer != box.group.rank and self._token.acquire(blocking=False):
            box.mute_wakeups()
            self._dispatcher = threading.get_ident()
            until = time.monotonic() + min(call.timeout, _POLL_S)
            try:
                while not call.done and (spins <= _SPINS or time.monotonic() <= until):
                    messages = box.poll()
                    for message in messages:
                        task = self.dispatch(message)
                        if task is not None:
                            self._hand_over(task[0], call.reply is message)
                    if not messages:
                        spins += 1
                        if spins > _SPINS:
                            os.sched_yield()
            finally:
                self._dispatcher = 0
                self._token.release()
                box.unmute()
        if not call.done:
            with self._workers.not_counted():
                call.sleep(call.timeout - (time.monotonic() - call.started))

    def _hand_over(self, task: Task, awaited: bool) -> None:
        """Run the task of the awaited answer here: no other thread needs to complete its future."""
        if awaited:
            _safely(task)
        else:
            self._workers.run(partial(_safely, task))


def _safely(task: Task) -> None:
    """Run a task, which reports its errors itself; one that does not must not end the receiving thread."""
    try:
        task()
    except Exception:
        _log.exception("handling a message failed")
