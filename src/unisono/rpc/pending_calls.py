"""Calls that this rank has made and that are not answered yet."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from unisono.core.transport import Envelope
from unisono.errors import AbortedError, CommError, CommTimeoutError
from unisono.rpc.context import context, request

__all__ = ["CallFuture", "FlowControl", "PendingCall", "PendingCalls"]

_WAIT_SLICE_S = 1.0
_MOST_CALLS = 16384
_MOST_BYTES = 256 << 20


class PendingCall:
    """One pending call. It ends once, by an answer or by an error; the first one counts.

    Attributes:
        number, peer: Number of the call, and the rank called.
        name: Name of the function, for messages.
        started, timeout: On the monotonic clock, and in seconds.
        nbytes: Size of the request, as counted by the peer's window.
        reply: The answer as received.
        error: Error that ended it without an answer.
        within: The autograd context it was made in, and the call of another rank that it is part of; both also apply
            to the callbacks of its future.
    """

    __slots__ = (
        "_lock", "done", "error", "future", "name", "nbytes", "number", "peer", "reply", "started", "timeout", "within"
    )  # fmt: skip

    def __init__(self, number: int, peer: int, name: str, timeout: float, future: CallFuture | None = None) -> None:
        self.number, self.peer, self.name = number, peer, name
        self.timeout = timeout
        self.started = time.monotonic()
        self.future = future
        self.within = context.get(), request.get()
        self.reply: Envelope | None = None
        self.error: BaseException | None = None
        self.done = False
        self.nbytes = 0
        # A bare lock: nothing else in Python wakes another thread as fast.
        self._lock = threading.Lock()
        self._lock.acquire()

    def end(self) -> None:
        """Mark the call as ended and wake its waiter."""
        self.done = True
        self._lock.release()

    def sleep(self, seconds: float) -> None:
        """Wait until it has ended, or the time is up."""
        if self._lock.acquire(timeout=max(seconds, 0.0)):
            self._lock.release()

    def late(self) -> CommTimeoutError:
        """Return the error of a call that has timed out."""
        waited = time.monotonic() - self.started
        return CommTimeoutError(
            f"waited {waited:.1f} s for rank {self.peer} to answer {self.name}. It may still run there; pass a "
            "longer timeout if it needs more time",
            peer=self.peer,
            waited_s=waited,
            operation="rpc",
        )

    def cancelled(self) -> AbortedError:
        """Return the error of a cancelled call."""
        message = f"the call of {self.name} on rank {self.peer} was cancelled"
        return AbortedError(message, peer=self.peer, operation="rpc")


class CallFuture(torch.futures.Future):  # type: ignore[type-arg]  # torch's is generic for checkers only
    """Future of a call made by `rpc_async`, with `cancel`."""

    def __init__(self) -> None:
        super().__init__()
        self._cancel: Callable[[], bool] | None = None
        self._attend: Callable[[], None] | None = None

    def wait(self) -> Any:
        """Wait for the result and return it, or raise the error; this thread helps to receive it."""
        if not self.done() and self._attend is not None:
            self._attend()
        return super().wait()

    def cancel(self) -> bool:
        """Stop waiting: the future fails with `AbortedError`, and a call that has not started never runs.

        Returns whether it was in time. A function already running finishes, and its result is dropped.
        """
        return self._cancel() if self._cancel is not None else False


class FlowControl:
    """Limit on the calls that this rank may have pending at one peer, which bounds the peer's queue.

    Args:
        most_calls: Maximum number of unanswered calls.
        most_bytes: Maximum of their total size; a single call may be larger.
    """

    def __init__(self, most_calls: int, most_bytes: int) -> None:
        self._most_calls, self._most_bytes = most_calls, most_bytes
        self._calls = self._bytes = 0
        self._available = threading.Condition(threading.Lock())

    def enter(self, nbytes: int, deadline: float, blocked: Callable[[], Any], nested: bool = False) -> bool:
        """Wait for room for one more call and count it; False if there is none by the deadline.

        Args:
            nbytes: Its size.
            deadline: On the monotonic clock.
            blocked: A context manager to be in while waiting.
            nested: Whether it is part of another call, admitted elsewhere, which ends only after this one. It then
                does not wait, because calls that wait for each other could otherwise hold all the room.
        """
        with self._available:
            while not nested and self._calls:
                if self._calls < self._most_calls and self._bytes + nbytes <= self._most_bytes:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                with blocked():
                    self._available.wait(min(left, _WAIT_SLICE_S))
            self._calls += 1
            self._bytes += nbytes
            return True

    def leave(self, nbytes: int) -> None:
        """Return the room of a call that was answered, or never will be."""
        with self._available:
            self._calls -= 1
            self._bytes -= nbytes
            self._available.notify()


class PendingCalls:
    """Table of calls: admits them, ends each once, and keeps the deadlines of those that no thread waits for.

    Args:
        size: Number of ranks.
        wake: Wakes the thread that checks the deadlines.
        result: Returns the value of a call that has ended, or raises its error.
        cancel: Notifies the peer of a call that its answer is not awaited any more.

    Attributes:
        windows: Flow control, one per rank.
        number: Returns the number of a new call.
        sent: Number of requests sent to each rank.
    """

    def __init__(
        self,
        size: int,
        wake: Callable[[], None],
        result: Callable[[PendingCall], Any],
        cancel: Callable[[PendingCall], None],
    ) -> None:
        self.windows = [FlowControl(_MOST_CALLS, _MOST_BYTES) for _ in range(size)]
        self._wake, self._result, self._cancel = wake, result, cancel
        self.number = itertools.count(1).__next__
        self.sent: Counter[int] = Counter()
        self._open: dict[int, PendingCall] = {}
        self._unfinished: set[int] = set()
        self._due: list[tuple[float, int]] = []
        self._lock = threading.Lock()
        self._here = threading.local()
        self.next_due = float("inf")

    def __len__(self) -> int:
        """Return the number of pending calls: unanswered, or with running callbacks, which may make more calls."""
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
                # It has no callbacks.
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
        """Return the calls pending at this rank; at any rank if None."""
        return [call for call in list(self._open.values()) if peer is None or call.peer == peer]

    def late(self) -> list[PendingCall]:
        """Return the calls with a future that have timed out; each is reported once."""
        now, found = time.monotonic(), []
        with self._lock:
            while self._due and (self._due[0][0] <= now or self._due[0][1] not in self._open):
                _, number = heapq.heappop(self._due)
                call = self._open.get(number)
                if call is not None:
                    found.append(call)
            self.next_due = self._due[0][0] if self._due else float("inf")
        return found

    # -- ends ----------------------------------------------------------------------------------
    def give_up(self, call: PendingCall, error: CommError) -> bool:
        """End a call without its answer and send a cancel to its peer; False if it was answered meanwhile."""
        if self.pop(call.number) is None:
            return False
        self._cancel(call)
        self.end(call, error)
        return True

    def fail(self, peer: int | None, error: Callable[[], BaseException]) -> None:
        """End the calls pending at a lost rank, each with an error of its own; at any rank if None."""
        for call in self.of(peer):
            if self.pop(call.number) is not None:
                self.end(call, error())

    def end(self, call: PendingCall, error: BaseException | None = None) -> None:
        """End a popped call, by its answer or by an error: complete its future, and wake its waiter."""
        call.error = error
        try:
            if call.future is not None:
                self._complete(call.future, call)
        finally:
            self.forget(call)
            # Last, so that a woken waiter finds the future complete.
            call.end()

    def _complete(self, future: CallFuture, call: PendingCall) -> None:
        """Complete a future and run its callbacks here. A future completed elsewhere is left as it is."""
        before, self._here.call = getattr(self._here, "call", None), call
        within, request_token = context.set(call.within[0]), request.set(call.within[1])
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
        """Stop counting a call as pending if this thread runs its callback."""
        call = getattr(self._here, "call", None)
        if call is not None:
            self.forget(call)
