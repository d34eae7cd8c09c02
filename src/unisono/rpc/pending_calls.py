"""Table of the calls that this rank has made and that have not finished."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable

from unisono.core import clock
from unisono.rpc.flow_control import FlowControl
from unisono.rpc.pending_call import PendingCall

__all__ = ["PendingCalls"]

_MOST_CALLS = 16384
_MOST_BYTES = 256 << 20


class PendingCalls:
    """Table of pending calls. Decides which thread ends each call, and tracks the deadlines of calls with a future.

    A reply, a timeout, a lost rank and `cancel` compete to end a call: the first to `take` the call ends it. A call is
    *open* until it is taken, then *ending* while callbacks of its future run, which may make further calls:

    | state | in `_open` | in `_unfinished` | `add` | `take` | `finish` |
    |---|---|---|---|---|---|
    | new | | | open | | |
    | open | yes | yes | | ending, or finished if there is no future | |
    | ending | | yes | | | finished |
    | finished | | | | | |

    Args:
        size: Number of ranks.

    Attributes:
        windows: Flow control, one per rank.
        number: Function that returns the number of a new call.
        sent: Number of requests sent to each rank.
        next_due: Time on the library's clock at which `timed_out` should be called next.
    """

    def __init__(self, size: int) -> None:
        self.windows: list[FlowControl] = [FlowControl(_MOST_CALLS, _MOST_BYTES) for _ in range(size)]
        self.number: Callable[[], int] = itertools.count(1).__next__
        # The next two fields need no lock, because each operation on them is atomic, and `dict.pop` returns a call to
        # only one thread. `_unfinished` must contain every open call, so add a call to `_unfinished` first, and remove
        # it from `_unfinished` last.
        self._open: dict[int, PendingCall] = {}
        self._unfinished: set[int] = set()
        # Guards the fields below.
        self._lock = threading.Lock()
        self.sent: Counter[int] = Counter()
        self.next_due: float = math.inf
        # Deadlines of calls with a future. After a call has ended, its entry remains until `timed_out` reaches it.
        self._due: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Return the number of calls that are unanswered, or whose callbacks are running and may make further calls."""
        return len(self._unfinished)

    def add(self, call: PendingCall) -> bool:
        """Register a call that is about to be sent. Return whether its deadline is now the earliest.

        The table tracks deadlines only for calls with a future. Any other call's timeout is handled by the thread that
        waits for the call.
        """
        self._unfinished.add(call.number)
        self._open[call.number] = call
        with self._lock:
            self.sent[call.peer] += 1
            if call.future is None:
                return False
            due = call.started + call.timeout
            heapq.heappush(self._due, (due, call.number))
            earlier = due < self.next_due
            self.next_due = min(due, self.next_due)
            return earlier

    def take(self, number: int) -> PendingCall | None:
        """Return a call that this thread must now end; None if the call is unknown, or another thread ends it."""
        call = self._open.pop(number, None)
        if call is not None:
            self.windows[call.peer].leave(call.nbytes)
            if call.future is None:
                # Without a future, there are no callbacks, so nothing remains but to wake the waiter.
                self._unfinished.discard(number)
        return call

    def finish(self, call: PendingCall) -> None:
        """Record that a taken call has no more callbacks to run. Idempotent."""
        self._unfinished.discard(call.number)

    def retract(self, call: PendingCall) -> None:
        """Remove a call that was not sent."""
        with self._lock:
            self.sent[call.peer] -= 1
        self.abandon(call)

    def abandon(self, call: PendingCall) -> None:
        """Remove a call whose caller gets an error instead of a future. No effect if another thread ends the call."""
        if self.take(call.number) is not None:
            self.finish(call)

    def open(self, peer: int | None = None) -> list[PendingCall]:
        """Return the open calls to a rank, or to all ranks if `peer` is None."""
        return [call for call in list(self._open.values()) if peer is None or call.peer == peer]

    def timed_out(self) -> list[PendingCall]:
        """Return the open calls with a future that have timed out; each is reported once."""
        now = clock.now()
        found = []
        with self._lock:
            while self._due and (self._due[0][0] <= now or self._due[0][1] not in self._open):
                _, number = heapq.heappop(self._due)
                call = self._open.get(number)
                if call is not None:
                    found.append(call)
            self.next_due = self._due[0][0] if self._due else math.inf
        return found
