"""Calls that this rank has made and that are not answered yet."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import AbortedError, CommTimeoutError
from unisono.rpc.context import context, request

if TYPE_CHECKING:
    from unisono.core.mailbox import Envelope

__all__ = ["CallFuture", "FlowControl", "PendingCall", "PendingCalls"]

_WAIT_SLICE_S = 1.0
_FOREVER_S = threading.TIMEOUT_MAX / 2


class PendingCall:
    """One pending call. It ends once, by an answer or by an error; the first one counts.

    Attributes:
        number, peer: Number of the call, and the rank called.
        name: Name of the function, for messages.
        started, timeout: On the monotonic clock, and in seconds.
        nbytes: Size of the request, as counted by the peer's window.
        mail: The answer as received.
        error: Error that ended it without an answer.
        within: The autograd context it was made in, and the call of another rank that it is part of; both also apply
            to the callbacks of its future.
    """

    __slots__ = (
        "_lock", "done", "error", "future", "mail", "name", "nbytes", "number", "peer", "started", "timeout", "within"
    )  # fmt: skip

    def __init__(self, number: int, peer: int, name: str, timeout: float, future: CallFuture | None = None) -> None:
        self.number, self.peer, self.name = number, peer, name
        self.timeout = min(_FOREVER_S, timeout)
        self.started = time.monotonic()
        self.future = future
        self.within = context.get(), request.get()
        self.mail: Envelope | None = None
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
        self._room = threading.Condition(threading.Lock())

    def enter(self, nbytes: int, deadline: float, blocked: Callable[[], Any], nested: bool = False) -> bool:
        """Wait for room for one more call and count it; False if there is none by the deadline.

        Args:
            nbytes: Its size.
            deadline: On the monotonic clock.
            blocked: A context manager to be in while waiting.
            nested: Whether it is part of another call, admitted elsewhere, which ends only after this one. It then
                does not wait, because calls that wait for each other could otherwise hold all the room.
        """
        with self._room:
            if nested or self._fits(nbytes):
                self._count(nbytes)
                return True
        with blocked(), self._room:
            while not self._fits(nbytes):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._room.wait(min(left, _WAIT_SLICE_S))
            self._count(nbytes)
            return True

    def leave(self, nbytes: int) -> None:
        """Return the room of a call that was answered, or never will be."""
        with self._room:
            self._calls -= 1
            self._bytes -= nbytes
            self._room.notify()

    def _fits(self, nbytes: int) -> bool:
        return self._calls < self._most_calls and (not self._calls or self._bytes + nbytes <= self._most_bytes)

    def _count(self, nbytes: int) -> None:
        self._calls += 1
        self._bytes += nbytes


class PendingCalls:
    """Table of calls, and deadlines of the calls that no thread waits for directly.

    Args:
        windows: Flow control, one per rank.
        nudge: Wakes the thread that checks the deadlines.
    """

    def __init__(self, windows: list[FlowControl], nudge: Callable[[], None]) -> None:
        self._windows, self._nudge = windows, nudge
        self._numbers = itertools.count(1)
        self._open: dict[int, PendingCall] = {}
        self._unfinished: set[int] = set()
        self._due: list[tuple[float, int]] = []
        self._lock = threading.Lock()
        self.next_due = float("inf")

    def __len__(self) -> int:
        """Return the number of pending calls: unanswered, or with running callbacks, which may make more calls."""
        return len(self._unfinished)

    def number(self) -> int:
        """Return the number of a new call."""
        return next(self._numbers)

    def add(self, call: PendingCall) -> None:
        """Register a call. A call with a future ends by itself when it times out."""
        self._unfinished.add(call.number)
        self._open[call.number] = call
        if call.future is not None and call.timeout < _FOREVER_S:
            due = call.started + call.timeout
            with self._lock:
                heapq.heappush(self._due, (due, call.number))
                earlier = due < self.next_due
                self.next_due = min(due, self.next_due)
            if earlier:
                self._nudge()

    def pop(self, number: int) -> PendingCall | None:
        """Remove and return a call that is about to end; None if it has ended already."""
        call = self._open.pop(number, None)
        if call is not None:
            self._windows[call.peer].leave(call.nbytes)
        return call

    def forget(self, call: PendingCall) -> None:
        """Drop a call that is finished. Idempotent."""
        self._unfinished.discard(call.number)

    def of(self, peer: int) -> list[PendingCall]:
        """Return the calls pending at this rank."""
        return [call for call in list(self._open.values()) if call.peer == peer]

    def all(self) -> list[PendingCall]:
        """Return all pending calls."""
        return list(self._open.values())

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
