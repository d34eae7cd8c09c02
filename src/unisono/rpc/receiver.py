"""Receives messages in one permanent thread or, temporarily, in a thread that waits for a reply."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from unisono.core import clock
from unisono.core.threads import AutoResetEvent
from unisono.core.transport import Envelope, Mailbox
from unisono.errors import AbortedError, CommError, CommTimeoutError
from unisono.rpc.context import context, request

__all__ = ["CallFuture", "FlowControl", "Handler", "PendingCall", "PendingCalls", "Receiver", "Task", "Workers"]

Task = Callable[[], object]
Handler = Callable[[Envelope], tuple[Task, bool] | None]
"""Function that handles a message quickly. It returns the remaining task and whether the task is short, or None."""

_log = logging.getLogger(__name__)

_LINGER_S = 100e-6
"""Time for which the receiving thread polls after a message, before it sleeps."""
_SPINS = 30
_POLL_S = 1e-3
"""Time for which a thread that waits for a reply polls, before it sleeps."""
_TICK_S = 2e-3
"""The receiving thread is replaced if it runs one function for longer than this time."""
_QUIET_TICKS = 50
_NAP_S = 0.5


class Receiver:
    """Receives messages from a mailbox, and runs the resulting tasks.

    The receiving thread runs short functions itself, because handing them to another thread would take longer. A second
    thread, the deputy, takes over receiving if such a function takes longer than expected. A function that waits for a
    message therefore delays this message by a few milliseconds at most.

    Args:
        box: The mailbox.
        workers: Other threads, which run long functions.
        clock: Function called between messages. It returns the time of the next call, on the library's clock, and the
            tasks that are due.
        prepare: Function called at the start of each new thread.
        name: Name of the threads.

    Attributes:
        handlers: Handler of each kind of message, as passed to `start`.
        ended: Ranks whose exit has been handled or is being handled; their messages are dropped.
    """

    def __init__(
        self,
        box: Mailbox,
        workers: Workers,
        clock: Callable[[], tuple[float, list[Task]]],
        prepare: Callable[[], object],
        name: str,
    ) -> None:
        self._box = box
        self._workers = workers
        self.handlers: Mapping[int, Handler] = {}
        self.ended: set[int] = set()
        self._clock = clock
        self._prepare = prepare
        self._name = name
        self._token = threading.Lock()
        self._swap = threading.Lock()
        self._alarm = threading.Semaphore(0)
        self._todo: deque[tuple[Task, bool]] = deque()
        self._generation = 0
        self._runs = 0
        self._running = 0
        self._armed = False
        self._dispatcher = 0
        self.closed: bool = False

    def start(self, handlers: Mapping[int, Handler]) -> None:
        """Start receiving. Handlers are called in message order, by one thread at a time."""
        self.handlers = handlers
        self._start(self._receive)
        self._start(self._watch)

    def _start(self, life: Callable[[], None]) -> None:
        def live() -> None:
            self._prepare()
            life()

        threading.Thread(target=live, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Stop receiving; the threads exit by themselves."""
        self.closed = True
        self._alarm.release()
        self._box.wake()

    @property
    def dispatching(self) -> bool:
        """Return whether this thread is in the middle of a dispatch, during which it must not send."""
        return self._dispatcher == threading.get_ident()

    # -- the receiving thread ------------------------------------------------------------------
    def _receive(self) -> None:
        mine = self._generation
        box = self._box
        quiet_at = 0.0
        look_at = 0.0
        while not self.closed and self._generation == mine:
            moved = self._move()
            if self._todo and not self._run_all(mine):
                # The deputy receives now.
                return
            now = clock.now()
            if moved and box.eager:
                quiet_at = now + _LINGER_S
            if now > look_at or (not moved and now > quiet_at):
                # Check the clock after handling messages, because messages already received from a rank count, even if
                # the rank has since been lost.
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
            # Invalid message: receive nothing more from this rank.
            invalid = CommError(f"rank {message.peer} sent an invalid message: {error}", peer=message.peer)
            self._box.mark_lost(message.peer, invalid)
            return None

    def _move(self) -> bool:
        """Receive pending messages; return whether there were any."""
        if not self._token.acquire(blocking=False):
            # Another thread is polling, and dispatches the messages.
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
        """Run the queued tasks in order; return False if the deputy has replaced this thread."""
        todo = self._todo
        while todo:
            task, short = todo.popleft()
            if not short:
                self._workers.run(partial(_safely, task))
            elif not self._run(task, mine):
                return False
        return True

    def _run(self, task: Task, mine: int) -> bool:
        """Run a task in this thread; return False if the deputy has replaced this thread in the meantime."""
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
                seen = self._running
                total = self._runs
                time.sleep(_TICK_S)
                if seen and self._replace(seen):
                    self._start(self._watch)
                    return self._receive()
                quiet = 0 if self._runs != total or self._running else quiet + 1
                if quiet > _QUIET_TICKS:
                    self._armed = False
                    # A function that has just started may have seen `_armed` still set, and so not have woken the
                    # deputy.
                    self._armed = self._running > 0

    def _replace(self, seen: int) -> bool:
        """Become the receiving thread, if the current one is still running the same function."""
        with self._swap:
            if self._running != seen:
                return False
            self._generation += 1
            self._running = 0
            # Starting the next function wakes the next deputy.
            self._armed = False
        return True

    # -- threads that wait for a reply -----------------------------------------------------------------
    def wait_for_reply(self, call: PendingCall) -> None:
        """Wait until a call has ended or timed out; poll for its reply if this is likely to be faster."""
        box = self._box
        spins = 0
        awaited: Task | None = None
        if box.eager and call.peer != box.group.rank and self._token.acquire(blocking=False):
            box.mute_wakeups()
            self._dispatcher = threading.get_ident()
            until = clock.now() + min(call.timeout, _POLL_S)
            try:
                while not call.done and awaited is None and (spins <= _SPINS or clock.now() <= until):
                    messages = box.poll()
                    for message in messages:
                        task = self.dispatch(message)
                        if task is None:
                            continue
                        if message is call.reply:
                            awaited = task[0]
                        else:
                            self._workers.run(partial(_safely, task[0]))
                    if not messages:
                        spins += 1
                        if spins > _SPINS:
                            os.sched_yield()
            finally:
                self._dispatcher = 0
                self._token.release()
                box.unmute()
            if awaited is not None:
                # After polling: callbacks may wait for other calls, whose replies arrive only if some thread can poll.
                _safely(awaited)
        if not call.done:
            with self._workers.not_counted():
                call.sleep(call.timeout - (clock.now() - call.started))


def _safely(task: Task) -> None:
    """Run a task. Tasks report their own errors; an unreported error must not end the receiving thread."""
    try:
        task()
    except Exception:
        _log.exception("handling a message failed")


_IDLE_S = 5.0
_STUCK_S = 0.02
"""If tasks are queued and no task ends for this long, the running tasks may be waiting for queued tasks."""
_NOT_HERE = nullcontext()


class Workers:
    """Runs tasks in order of arrival, at most `most` at a time, not counting tasks that wait for another rank.

    Because waiting tasks do not count, nested callbacks of any depth cannot exhaust the threads. Waits that are
    invisible to this class (for a lock, or inside torch) do count. Therefore, if tasks are queued and no task has
    finished for a while, one more thread is admitted.

    Args:
        name: Name of the threads.
        most: Maximum number of tasks running concurrently.
        prepare: Function called at the start of each new thread.
    """

    def __init__(self, name: str, most: int, prepare: Callable[[], object]) -> None:
        self._name = name
        self._most = most
        self._prepare = prepare
        self._tasks: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._available = threading.Condition(self._lock)
        self._running = self._idle = self._ended = self._further = 0
        self._watched = False
        self._working: set[int] = set()
        self._closed = False

    def run(self, task: Callable[[], object]) -> None:
        """Queue a task. The task must handle its own errors."""
        with self._lock:
            self._tasks.append(task)
            self._start_threads()

    def not_counted(self) -> AbstractContextManager[object]:
        """Return a context in which this thread waits for another rank, and is not counted."""
        return self._aside() if threading.get_ident() in self._working else _NOT_HERE

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with self._lock:
            self._running -= 1
            self._start_threads()
        here = threading.get_ident()
        self._working.discard(here)
        try:
            yield
        finally:
            self._working.add(here)
            with self._lock:
                # This may temporarily exceed the limit, because a running task cannot be paused.
                self._running += 1

    def close(self) -> None:
        """Start no more tasks."""
        with self._lock:
            self._closed = True
            self._tasks.clear()
            self._available.notify_all()

    def _start_threads(self) -> None:
        """Make sure that a thread takes the first task, if one more task may run. Call with the lock held."""
        if not self._tasks or self._closed:
            return
        if self._running >= self._most + self._further:
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name=self._name, daemon=True).start()
        elif self._idle:
            self._available.notify()
        else:
            self._idle += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _watch(self) -> None:
        """While tasks are queued, admit one more thread whenever no task has finished for some time."""
        while True:
            seen = self._ended
            time.sleep(_STUCK_S)
            with self._lock:
                if not self._tasks or self._closed:
                    self._watched = False
                    return
                if self._ended == seen:
                    self._further += 1
                    self._start_threads()

    def _work(self) -> None:
        self._prepare()
        here = threading.get_ident()
        while (task := self._next()) is not None:
            self._working.add(here)
            try:
                task()
            finally:
                self._working.discard(here)
                del task
                with self._lock:
                    self._running -= 1
                    self._idle += 1
                    self._ended += 1
                    if self._running < self._most:
                        self._further = 0

    def _next(self) -> Callable[[], object] | None:
        """Return the next task; None if no task arrives for a while. The caller must be counted as idle."""
        with self._lock:
            while not self._tasks or self._running >= self._most + self._further:
                if self._closed or not self._available.wait(_IDLE_S):
                    self._idle -= 1
                    # A task may have arrived just as the time ran out.
                    self._start_threads()
                    return None
            self._idle -= 1
            self._running += 1
            task = self._tasks.popleft()
            self._start_threads()
            return task


_WAIT_SLICE_S = 1.0
_MOST_CALLS = 16384
_MOST_BYTES = 256 << 20


class PendingCall:
    """One pending call. It ends once, with a reply or an error, whichever comes first.

    Attributes:
        number, peer: The call's number, and the rank called.
        name: Name of the function, for messages.
        started, timeout: Start time on the library's clock, and timeout in seconds.
        nbytes: Size of the request in bytes, as counted by flow control.
        reply: The reply as received.
        error: Error that ended the call without a reply.
        within: Autograd context of the call, and the request from another rank that the call is part of. Callbacks of
            the call's future run in the same context and request.
    """

    __slots__ = (
        "_ended", "done", "error", "future", "name", "nbytes", "number", "peer", "reply", "started", "timeout", "within"
    )  # fmt: skip

    def __init__(self, number: int, peer: int, name: str, timeout: float, future: CallFuture | None = None) -> None:
        self.number: int = number
        self.peer: int = peer
        self.name: str = name
        self.timeout: float = timeout
        self.started: float = clock.now()
        self.future: CallFuture | None = future
        self.within: tuple[int, Any] = context.get(), request.get()
        self.reply: Envelope | None = None
        self.error: BaseException | None = None
        self.done: bool = False
        self.nbytes: int = 0
        self._ended = AutoResetEvent()

    def end(self) -> None:
        """Mark the call as ended and wake its waiter."""
        self.done = True
        self._ended.set()

    def sleep(self, seconds: float) -> None:
        """Wait until the call has ended, or the time is up."""
        if clock.wait(self._ended, clock.now() + seconds):
            # Wake the next waiter, because another thread may wait for the same future.
            self._ended.set()

    def late(self) -> CommTimeoutError:
        """Return the error for a call that has timed out."""
        waited = clock.now() - self.started
        return CommTimeoutError(
            f"waited {waited:.1f} s for rank {self.peer} to answer {self.name}. It may still run there; pass a "
            "longer timeout if it needs more time",
            peer=self.peer,
            waited_s=waited,
            operation="rpc",
        )

    def cancelled(self) -> AbortedError:
        """Return the error for a cancelled call."""
        message = f"the call of {self.name} on rank {self.peer} was cancelled"
        return AbortedError(message, peer=self.peer, operation="rpc")


class CallFuture(torch.futures.Future[Any]):
    """Future of a call made by `rpc_async`, with `cancel`."""

    def __init__(self) -> None:
        super().__init__()
        self._cancel: Callable[[], bool] | None = None
        self._attend: Callable[[], None] | None = None

    def wait(self) -> Any:
        """Wait for the result and return it, or raise the error; this thread receives messages while it waits."""
        if not self.done() and self._attend is not None:
            self._attend()
        return super().wait()

    def cancel(self) -> bool:
        """Cancel the call: the future fails with `AbortedError`, and the function does not run unless it has started.

        Returns whether the call was still pending. A function that is already running finishes, and its result is
        dropped.
        """
        return self._cancel() if self._cancel is not None else False


class FlowControl:
    """Limit on this rank's pending calls to one peer, which bounds the peer's queue.

    Args:
        most_calls: Maximum number of unanswered calls.
        most_bytes: Maximum total size of these calls in bytes; a single call may be larger.
    """

    def __init__(self, most_calls: int, most_bytes: int) -> None:
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        self._calls = self._bytes = 0
        self._available = threading.Condition(threading.Lock())

    def enter(self, nbytes: int, deadline: float, blocked: Callable[[], Any], nested: bool = False) -> bool:
        """Wait until one more call is allowed, and count it; return False if the deadline passes first.

        Args:
            nbytes: Size of the call.
            deadline: Deadline on the library's clock.
            blocked: A context manager to enter while waiting.
            nested: Whether the call is made while serving another rank's call, which ends only after this call. A
                nested call does not wait, because calls that wait for each other could otherwise exhaust the limit.
        """
        with self._available:
            while not nested and self._calls:
                if self._calls < self._most_calls and self._bytes + nbytes <= self._most_bytes:
                    break
                left = deadline - clock.now()
                if left <= 0:
                    return False
                with blocked():
                    self._available.wait(min(left, _WAIT_SLICE_S))
            self._calls += 1
            self._bytes += nbytes
            return True

    def leave(self, nbytes: int) -> None:
        """Stop counting a call that has been answered or never will be."""
        with self._available:
            self._calls -= 1
            self._bytes -= nbytes
            self._available.notify()


class PendingCalls:
    """Table of calls: admits calls, ends each call once, and enforces the deadlines of calls that no thread waits for.

    Args:
        size: Number of ranks.
        wake: Function that wakes the thread that checks the deadlines.
        result: Function that returns the value of a call that has ended, or raises its error.
        cancel: Function that notifies the peer that no thread waits for the reply to a call any more.

    Attributes:
        windows: Flow control, one per rank.
        number: Function that returns the number of a new call.
        sent: Number of requests sent to each rank.
    """

    def __init__(
        self,
        size: int,
        wake: Callable[[], None],
        result: Callable[[PendingCall], Any],
        cancel: Callable[[PendingCall], None],
    ) -> None:
        self.windows: list[FlowControl] = [FlowControl(_MOST_CALLS, _MOST_BYTES) for _ in range(size)]
        self._wake = wake
        self._result = result
        self._cancel = cancel
        self.number: Callable[[], int] = itertools.count(1).__next__
        self.sent: Counter[int] = Counter()
        self._open: dict[int, PendingCall] = {}
        self._unfinished: set[int] = set()
        self._due: list[tuple[float, int]] = []
        self._lock = threading.Lock()
        self._here = threading.local()
        self.next_due: float = float("inf")

    def __len__(self) -> int:
        """Return the number of calls that are unanswered, or whose callbacks are running and may make further calls."""
        return len(self._unfinished)

    def add(self, call: PendingCall) -> None:
        """Register a call that is about to be sent. A call with a future ends by itself when it times out."""
        self._unfinished.add(call.number)
        self._open[call.number] = call
        with self._lock:
            self.sent[call.peer] += 1
        if call.future is not None:
            due = call.started + call.timeout
            with self._lock:
                heapq.heappush(self._due, (due, call.number))
                earlier = due < self.next_due
                self.next_due = min(due, self.next_due)
            if earlier:
                self._wake()

    def pop(self, number: int) -> PendingCall | None:
        """Remove and return a call that is about to end; None if it has ended already."""
        call = self._open.pop(number, None)
        if call is not None:
            self.windows[call.peer].leave(call.nbytes)
            if call.future is None:
                # Without a future there are no callbacks, so the call is finished.
                self._unfinished.discard(number)
        return call

    def retract(self, call: PendingCall) -> None:
        """Remove a call that was not sent."""
        with self._lock:
            self.sent[call.peer] -= 1
        self.pop(call.number)
        self.forget(call)

    def forget(self, call: PendingCall) -> None:
        """Drop a call that is finished. Idempotent."""
        self._unfinished.discard(call.number)

    def of(self, peer: int | None = None) -> list[PendingCall]:
        """Return the pending calls to a rank, or to all ranks if None."""
        return [call for call in list(self._open.values()) if peer is None or call.peer == peer]

    def late(self) -> list[PendingCall]:
        """Return the calls with a future that have timed out; each is reported once."""
        now = clock.now()
        found = []
        with self._lock:
            while self._due and (self._due[0][0] <= now or self._due[0][1] not in self._open):
                _, number = heapq.heappop(self._due)
                call = self._open.get(number)
                if call is not None:
                    found.append(call)
            self.next_due = self._due[0][0] if self._due else float("inf")
        return found

    # -- completion ----------------------------------------------------------------------------
    def give_up(self, call: PendingCall, error: CommError) -> bool:
        """End a call without a reply, and notify its peer; return False if the reply arrived in the meantime."""
        if self.pop(call.number) is None:
            return False
        self._cancel(call)
        self.end(call, error)
        return True

    def fail(self, peer: int | None, error: Callable[[], BaseException]) -> None:
        """End the pending calls to a lost rank (to all ranks if None), each with its own error."""
        for call in self.of(peer):
            if self.pop(call.number) is not None:
                self.end(call, error())

    def end(self, call: PendingCall, error: BaseException | None = None) -> None:
        """End a popped call with its reply or an error: complete its future, and wake its waiter."""
        call.error = error
        try:
            if call.future is not None:
                self._complete(call.future, call)
        finally:
            self.forget(call)
            # Wake the waiter last, so that it finds the future complete.
            call.end()

    def _complete(self, future: CallFuture, call: PendingCall) -> None:
        """Complete a future and run its callbacks in this thread. A future that is complete remains unchanged."""
        before = getattr(self._here, "call", None)
        self._here.call = call
        within = context.set(call.within[0])
        request_token = request.set(call.within[1])
        try:
            value = self._result(call)
        except Exception as raised:
            if not future.done():
                future.set_exception(raised)
        else:
            if not future.done():
                future.set_result(value)
        finally:
            context.reset(within)
            request.reset(request_token)
            self._here.call = before

    def leave_callback(self) -> None:
        """If this thread runs a callback of a call, stop counting the call as pending."""
        call = getattr(self._here, "call", None)
        if call is not None:
            self.forget(call)
