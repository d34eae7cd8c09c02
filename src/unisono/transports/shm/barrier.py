"""Barrier in shared memory: counters and signatures, each written by one rank only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from unisono.core.failure import left_error
from unisono.errors import CommTimeoutError
from unisono.host.cpu_count import cores
from unisono.transports.shm.futex import futex_wait, futex_wake
from unisono.transports.shm.words import Words

__all__ = ["SharedBarrier", "missing_ranks_error"]

_LINE = 8
_LINES = 4
_STRIDE = _LINE * _LINES
_ARRIVED, _REDUCED, _LEFT = 0, 1, 2
_SIGNATURES = (1 * _LINE, 2 * _LINE)
_SLEEPING, _WAKEUPS = 3 * _LINE, 3 * _LINE + 1

_SPINS = 200
_YIELDS = 100
_SLEEP_S = 0.002


def missing_ranks_error(waited_s: float, ranks: Sequence[int]) -> CommTimeoutError:
    """Return the error of a wait for ranks that has timed out."""
    return CommTimeoutError(
        f"waited {waited_s:.1f} s for rank {', '.join(map(str, ranks))}. Is it alive, or did it skip a call?",
        peer=ranks[0] if ranks else None,
        waited_s=waited_s,
    )


class SharedBarrier:
    """Counters of every rank, 256 bytes each, and the wait for them.

    A rank writes only its own counters. `arrive_and_wait` counts rounds: a rank that has arrived in round n has
    finished reading what the others wrote for round n - 1, so two buffers used in turn need no further
    synchronization: the words order the buffers' contents, too. An arrival carries a few words, the signature, that
    describe what the rank is about to do.

    Waiting: poll some hundred times, then yield the processor, then sleep until woken (at
    most 2 ms, so that nothing depends on the wake-up).

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
        self._words, self._address, self.rank, self.size = words, address, rank, size
        self._base = [r * _STRIDE for r in range(size)]
        self._bases = [base for r, base in enumerate(self._base) if r != rank]
        self._own = self._base[rank]
        self._spins = _SPINS if size <= cores() else 3
        self.broken: BaseException | None = None

    # -- rounds --------------------------------------------------------------------------------
    @property
    def round(self) -> int:
        """The number of the last round; the native core counts in the same words."""
        return self._words[self._own]

    def arrive_and_wait(
        self,
        deadline: float,
        signature: tuple[int, int, int, int] | None = None,
    ) -> bool:
        """Publish that this rank's part of the next round is staged, and wait for the parts of all other ranks.

        Returns whether any rank's signature differs from this one's in its first three words.
        """
        words, own = self._words, self._own
        number = self.round + 1
        if signature is None:
            words[own] = number
            self._wait(_ARRIVED, number, deadline)
            return False
        offset = _SIGNATURES[number & 1]
        index = own + offset
        words[index], words[index + 1], words[index + 2], words[index + 3] = signature
        words[own] = number
        self._wait(_ARRIVED, number, deadline)
        first, second, third, _ = signature
        for base in self._bases:
            index = base + offset
            if words[index] != first or words[index + 1] != second or words[index + 2] != third:
                return True
        return False

    def payloads(self) -> list[int]:
        """The fourth word of each rank's signature of this round."""
        words, offset = self._words, _SIGNATURES[self.round & 1] + 3
        return [words[base + offset] for base in self._base]

    def reduce_barrier(self, deadline: float) -> None:
        """Publish that this rank's share of the round is reduced, and wait for the shares of all other ranks."""
        self._words[self._own + _REDUCED] = number = self._words[self._own + _REDUCED] + 1
        self._wait(_REDUCED, number, deadline)

    def _wait(self, counter: int, number: int, deadline: float) -> None:
        """Wake sleeping ranks, and wait until the counter of every rank has reached a number."""
        words = self._words
        for base in self._bases:
            if words[base + _SLEEPING]:
                self.wake(base // _STRIDE)
        for base in self._bases:
            index = base + counter
            if words[index] >= number:
                continue
            spins = self._spins
            while words[index] < number and spins:
                spins -= 1
            if words[index] < number:
                self._wait_for(base // _STRIDE, index, number, deadline)

    def _wait_for(self, rank: int, index: int, number: int, deadline: float) -> None:
        words = self._words
        self.wait_until(lambda: words[index] >= number, deadline, lambda: [rank])

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
        words, own, started = self._words, self._own, time.monotonic()
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
