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
    """One call under way. It ends once, by an answer or by an error; the first one counts.

    Attributes:
        number, peer: Which call, of whom.
        name: What is called, for messages.
        started, timeout: On the monotonic clock, and in seconds.
        nbytes: Of the request, as counted by the peer's window.
        mail: The answer as it arrived.
        error: What ended it without one.
        within: The context of autograd that it was made in, and the call of another rank that it is part of: those of
            the callbacks of its future, too.
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
        """The outcome is known: wake who waits."""
        self.done = True
        self._lock.release()

    def sleep(self, seconds: float) -> None:
        """Until it has ended, or the time is up."""
        if self._lock.acquire(timeout=max(seconds, 0.0)):
            self._lock.release()

    def late(self) -> CommTimeoutError:
        """The error of a call that has taken too long."""
        waited = time.monotonic() - self.started
        return CommTimeoutError(
            f"waited {waited:.1f} s for rank {self.peer} to answer {self.name}. It may still run there; give the call "
            "a longer timeout if it needs more time",
            peer=self.peer,
            waited_s=waited,
            operation="rpc",
        )

    def cancelled(self) -> AbortedError:
        """The error of a call that nobody wants to wait for."""
        message = f"the call of {self.name} on rank {self.peer} was cancelled"
        return AbortedError(message, peer=self.peer, operation="rpc")


class CallFuture(torch.futures.Future):  # type: ignore[type-arg]  # torch's is generic for checkers only
    """The result of a call that was made by `rpc_async`; also knows how to `cancel` it."""

    def __init__(self) -> None:
        super().__init__()
        self._cancel: Callable[[], bool] | None = None
        self._attend: Callable[[], None] | None = None

    def wait(self) -> Any:
        """The result, or the error, when it is there; this thread helps to receive it."""
        if not self.done() and self._attend is not None:
            self._attend()
        return super().wait()

    def cancel(self) -> bool:
        """Wait for it no longer: the future ends with `AbortedError`, and a call that has not begun never does.

        Returns whether it was in time. What runs already goes on to its end, and its result is dropped.
        """
        return self._cancel() if self._cancel is not None else False


class FlowControl:
    """How much this rank may have under way at one peer: a bound on what waits there.

    Args:
        most_calls: Calls that are not answered.
        most_bytes: Their size together; one alone may be longer.
    """

    def __init__(self, most_calls: int, most_bytes: int) -> None:
        self._most_calls, self._most_bytes = most_calls, most_bytes
        self._calls = self._bytes = 0
        self._room = threading.Condition(threading.Lock())

    def enter(self, nbytes: int, deadline: float, blocked: Callable[[], Any], nested: bool = False) -> bool:
        """Count one more call, when there is room for it; False if there is none by the deadline.

        Args:
            nbytes: Its size.
            deadline: On the monotonic clock.
            blocked: A context manager to be in while waiting.
            nested: It is part of another call, which has been let in somewhere and ends only after this one: so it
                does not wait, for else calls that wait for each other could hold all the room there is.
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
        """A call was answered, or never will be."""
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
    """The table of calls, and the clock of those that nobody waits for in person.

    Args:
        windows: One a rank.
        nudge: Wakes the thread that looks at the clock.
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
        """How many are under way: not answered, or callbacks of their futures still run, and may call on."""
        return len(self._unfinished)

    def number(self) -> int:
        """For a new call."""
        return next(self._numbers)

    def add(self, call: PendingCall) -> None:
        """Expect an answer. A call with a future ends by itself when its time is up."""
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
        """The call is about to end, and none too many times: None if it has already."""
        call = self._open.pop(number, None)
        if call is not None:
            self._windows[call.peer].leave(call.nbytes)
        return call

    def forget(self, call: PendingCall) -> None:
        """Nothing more will come of it. Again is harmless."""
        self._unfinished.discard(call.number)

    def of(self, peer: int) -> list[PendingCall]:
        """Those that wait for this rank."""
        return [call for call in list(self._open.values()) if call.peer == peer]

    def all(self) -> list[PendingCall]:
        """Those that wait for anybody."""
        return list(self._open.values())

    def late(self) -> list[PendingCall]:
        """Those with a future whose time is up; each is told once."""
        now, found = time.monotonic(), []
        with self._lock:
            while self._due and (self._due[0][0] <= now or self._due[0][1] not in self._open):
                _, number = heapq.heappop(self._due)
                call = self._open.get(number)
                if call is not None:
                    found.append(call)
            self.next_due = self._due[0][0] if self._due else float("inf")
        return found
