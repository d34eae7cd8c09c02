"""Before a collective moves anything: have all ranks come, and to the same call? One small reduction tells."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from unisono.errors import CommTimeoutError, PeerLostError
from unisono.mpilib import until
from unisono.transports._mpi_comms import Comms

__all__ = ["Agreement", "Said", "word_of"]

Said = tuple[bytes, bytes]
"""The words of a call, and their sums if all ranks are at the same one."""

_WORD, _LEVEL = 2**64, 2**32
_MOST = 4096
_LAST_WORD_S = 0.02
_LOOKS = range(100)
_WORDS = struct.Struct("=3Q")
_words: dict[tuple[Any, ...], int] = {}


def word_of(compared: tuple[Any, ...]) -> int:
    """64 bits that stand for what ranks compare of a call: `Fingerprint.compared()` without the call's number.

    Example:
        >>> word_of(("barrier", "bor")) == word_of(("barrier", "bor")), word_of(("barrier",)) == word_of(())
        (True, False)
    """
    word = _words.get(compared)
    if word is None:
        if len(_words) >= _MOST:
            _words.clear()
        word = _words[compared] = xxhash.xxh3_64_intdigest(repr(compared).encode())
    return word


class Agreement:
    """Sums three words of 64 bits over all ranks.

    The first stands for the call: if the sum is as many times this rank's word as there are ranks, all words
    are equal, but for a chance of about 2**-60 that different ones add up to the same. The second, where each
    rank has a number for each other one, sums what is given with one sign and what is expected with the other,
    each pair with an odd factor of its own: it is 0 if all fit. The third counts, and above its 32 bits those that
    could make a call the simpler way: it is made so if all can.

    Nobody has to be there in time: a rank looks again and again whether the sum is there, so that its
    wait ends at a deadline, by an abort, or when a rank is lost.

    Args:
        comms: Whose ranks agree.
        look: Called in long waits, with all other ranks; may raise.
        spins: How often to ask MPI before giving way.
        page: Of the three words: makes what sums them through memory that all ranks share; else MPI does it.

    Attributes:
        alike: Whether all ranks gave the same word the last time, and their rows fitted.
        counted: The sum of what ranks counted then.
        page: What it sums by, if not by MPI.
    """

    def __init__(
        self,
        comms: Comms,
        look: Callable[[Sequence[int]], object],
        spins: int,
        page: Callable[[bytearray], Any] | None = None,
    ) -> None:
        mpi = comms.mpi
        self._comms, self._spins, self._look = comms, spins, look
        self._rank, self._size = comms.own.Get_rank(), comms.own.Get_size()
        self._words = bytearray(_WORDS.size)
        self._sums = memoryview(self._words).cast("Q")
        self._arguments = (mpi.IN_PLACE, [self._sums, 3, mpi.UINT64_T], mpi.SUM)
        self._start: Callable[[], object] = self._first
        self._test: Callable[[], bool] = _yes
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._given: list[int] = []
        self._taken: list[int] = []
        self._number = 0
        self.alike, self.counted = True, 0
        self.page = None if page is None else page(self._words)
        if self.page is not None:
            self._start, self._test = self.page.start, self.page.test

    @property
    def number(self) -> int:
        """How often ranks have tried to agree; the same on all of them."""
        number: int = self._number if self.page is None else self.page.number
        return number

    def reach(self, said: Said, deadline: float, count: int = 0) -> bool:
        """Whether the sums are what was wanted: all are at this call, nothing is counted, and all take the same way.

        Otherwise `alike` and `counted` tell more.

        Args:
            said: As of `say`.
            deadline: On the monotonic clock.
            count: For `counted`.

        Raises:
            CommTimeoutError: Not all have come until the deadline. There is no second try.
        """
        comms = self._comms
        if comms.broken is not None:
            raise comms.broken
        self._number += 1
        self._words[:] = said[0]
        self._sums[2] += count
        lock = comms.lock
        if lock is not None:
            lock.acquire()
        try:
            try:
                self._start()
                over, test = False, self._test
                for _ in _LOOKS:
                    # Most often the others come at about the same time.
                    if over := test():
                        break
            finally:
                if lock is not None:
                    lock.release()
        except comms.mpi.Exception as error:
            raise comms.error_of(error) from error
        return self._judged(said) if over else self.see_through(said, deadline)

    def see_through(self, said: Said, deadline: float) -> bool:
        """The rest of `reach`, from when this rank has given its words."""
        comms = self._comms
        try:
            self._wait(deadline)
        except comms.mpi.Exception as error:
            raise comms.error_of(error) from error
        return self._judged(said)

    def _judged(self, said: Said) -> bool:
        if self._comms.broken is not None:
            raise self._comms.broken
        words, wanted = self._words, said[1]
        if words == wanted:
            self.alike, self.counted = True, 0
            return True
        self.alike, self.counted = words[:16] == wanted[:16], self._sums[2] % _LEVEL
        return False

    def say(self, word: int, rows: int = 0, *, level: bool = False) -> Said:
        """What this rank gives, and what is to come of it.

        Args:
            word: As of `word_of`.
            rows: As of `rows_of`.
            level: Whether this rank takes the way that is open to those only whose parts are level.
        """
        third = _LEVEL if level else 0
        return _WORDS.pack(word, rows, third), _WORDS.pack(word * self._size % _WORD, 0, third * self._size)

    def _first(self) -> None:
        """Start the sum. MPI prepares it once, if it knows how to: that halves the time."""
        own = self._comms.own
        if self._size == 1:
            self._start = _yes
            return
        try:
            request = own.Allreduce_init(*self._arguments)
        except (AttributeError, NotImplementedError, self._comms.mpi.Exception):
            # Older than MPI 4.
            self._test = own.Iallreduce(*self._arguments).Test
            return
        self._start, self._test = request.Start, request.Test
        request.Start()

    def _wait(self, deadline: float) -> None:
        turn, began = self._comms.turn, time.monotonic()

        def done() -> bool:
            with turn:
                return bool(self._test())

        try:
            over = until(done, deadline, lambda: self._look(self._others), self._spins)
        except PeerLostError:
            # Its last word may have come before it left.
            if not until(done, time.monotonic() + _LAST_WORD_S, spins=self._spins):
                raise
            return
        if not over:
            waited = time.monotonic() - began
            raise CommTimeoutError(f"waited {waited:.1f} s for the other ranks", waited_s=waited)

    def rows_of(self, sends: Sequence[int], receives: Sequence[int]) -> int:
        """What stands for this rank's counts to and from each other one."""
        if not self._given:
            self._given = [_factor(self._rank, other) for other in range(self._size)]
            self._taken = [_factor(other, self._rank) for other in range(self._size)]
        given = sum(factor * count for factor, count in zip(self._given, sends, strict=True))
        taken = sum(factor * count for factor, count in zip(self._taken, receives, strict=True))
        return (given - taken) % _WORD


def _yes() -> bool:
    return True


def _factor(source: int, target: int) -> int:
    return xxhash.xxh3_64_intdigest(b"%d to %d" % (source, target)) | 1
