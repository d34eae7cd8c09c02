"""Counters of the ranks in shared memory, each written by one rank only, and the waits of messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from unisono.core.failure import left_error
from unisono.core.work import missing_ranks_error
from unisono.transports.shm.segment import Words, futex_wait, futex_wake

__all__ = ["SharedBarrier"]

_STRIDE = 32
_LEFT = 2
_SLEEPING = 24
_WAKEUPS = 25

_YIELDS = 100
_SLEEP_S = 0.002


class SharedBarrier:
    """Counters of every rank, 256 bytes each, as in src/native/shm/barrier.hpp, which counts the rounds of collectives.

    A wait polls, then yields the processor, then sleeps until woken (at most 2 ms, so that nothing depends on the
    wake-up).

    Args:
        words: The memory, by `words_of`.
        address: Address of its first byte.
        rank: This rank.
        size: Number of ranks.
    """

    @staticmethod
    def nbytes(size: int) -> int:
        """Memory that a barrier of `size` ranks takes."""
        return size * _STRIDE * 8

    def __init__(self, words: Words, address: int, rank: int, size: int) -> None:
        self._words = words
        self._address = address
        self.rank = rank
        self.size = size
        self._base = [r * _STRIDE for r in range(size)]
        self._bases = [base for r, base in enumerate(self._base) if r != rank]
        self._own = self._base[rank]
        self.broken: BaseException | None = None

    @property
    def round(self) -> int:
        """The number of this rank's last round."""
        return self._words[self._own]

    # -- waiting -------------------------------------------------------------------------------
    def wait_until(
        self,
        ready: Callable[[], bool],
        deadline: float,
        missing: Callable[[], Sequence[int]],
    ) -> None:
        """Yield until a condition holds.

        Raises as `check`, or `CommTimeoutError`.
        """
        words = self._words
        own = self._own
        started = time.monotonic()
        for _ in range(_YIELDS):
            os.sched_yield()
            if ready():
                return
        while not ready():
            self.check(ready, missing)
            if time.monotonic() > deadline:
                raise missing_ranks_error(time.monotonic() - started, missing())
            seen = words[own + _WAKEUPS]
            words[own + _SLEEPING] = 1
            if not ready():
                futex_wait(self._address + (own + _WAKEUPS) * 8, seen, _SLEEP_S)
            words[own + _SLEEPING] = 0

    def check(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Raise if the wait cannot succeed: the cause of an abort, or the loss of a missing rank."""
        if self.broken is not None:
            raise self.broken
        for rank in missing():
            # The rank may have arrived before it left, and another thread may have received its messages.
            if self._words[self._base[rank] + _LEFT] and not ready() and rank in missing():
                raise left_error(rank)

    def leave(self) -> None:
        """Publish that this rank leaves."""
        self._words[self._own + _LEFT] = 1
        for base in self._bases:
            self.wake(base // _STRIDE)

    def wake(self, rank: int) -> None:
        """Wake one rank if it sleeps."""
        base = self._base[rank]
        if self._words[base + _SLEEPING]:
            self._words[base + _WAKEUPS] = (self._words[base + _WAKEUPS] + 1) & 0xFFFFFFFF
            futex_wake(self._address + (base + _WAKEUPS) * 8)
