"""Limit on the unanswered calls to one rank."""

from __future__ import annotations

import math
import threading

from unisono.core import clock

__all__ = ["FlowControl"]

_WAIT_SLICE_S = 1.0


class FlowControl:
    """Limit on this rank's pending calls to one peer, which bounds the peer's queue.

    Args:
        most_calls: Maximum number of unanswered calls.
        most_bytes: Maximum total size of the unanswered calls in bytes; a single call may be larger.
    """

    def __init__(self, most_calls: int, most_bytes: int) -> None:
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        self._calls = self._bytes = 0
        self._available = threading.Condition(threading.Lock())

    def enter(self, nbytes: int, deadline: float = -math.inf, *, nested: bool = False) -> bool:
        """Wait until one more call is allowed, and count it; return False if the deadline passes first.

        Args:
            nbytes: Size of the call.
            deadline: Deadline on the library's clock; by default, do not wait.
            nested: Whether the call is made while serving another rank's call, which ends only after this call. A
                nested call is always allowed, because calls that wait for each other could otherwise exhaust the limit.
        """
        with self._available:
            while not nested and self._calls:
                if self._calls < self._most_calls and self._bytes + nbytes <= self._most_bytes:
                    break
                left = deadline - clock.now()
                if left <= 0:
                    return False
                # Wait in slices for two reasons. A debugger may stop the library's clock. And `leave` wakes only one
                # thread, whose call may be too large for the freed capacity although another thread's call would fit.
                self._available.wait(min(left, _WAIT_SLICE_S))
            self._calls += 1
            self._bytes += nbytes
            return True

    def leave(self, nbytes: int) -> None:
        """Stop counting a call that has been answered, or that will never be answered."""
        with self._available:
            self._calls -= 1
            self._bytes -= nbytes
            self._available.notify()
