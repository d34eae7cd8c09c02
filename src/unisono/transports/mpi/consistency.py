"""Check, with one small reduction before each collective, that all ranks have reached the same call."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cached_property

import xxhash

from unisono.core import clock
from unisono.core.call import Fingerprint, hash_of
from unisono.errors import CommTimeoutError, PeerLostError
from unisono.transports.mpi.communicators import MpiCommunicators

__all__ = ["MpiAgreement", "word_of"]

_WORD = 2**64
_LAST_CONTRIBUTION_S = 0.02
_LOOKS = 100
_WORDS = struct.Struct("=3Q")


class MpiAgreement:
    """Compares all ranks' calls in one all_reduce, which sums three 64-bit words over all ranks.

    The first word identifies the call. If the sum equals this rank's word times the number of ranks, all words are
    equal, except with a probability of about 2**-60. If a collective has a separate count for each pair of ranks, each
    count is multiplied by an odd factor for its pair. The second word is then the sum of the counts that a rank sends,
    minus the sum of the counts that it expects; the second words add up to 0 if all counts match. The third word counts
    the ranks that pass `count=1`.

    Each rank polls for the sum, so its wait ends at the deadline, on an abort, or when a rank is lost, even if other
    ranks never arrive.

    Args:
        comms: The communicators of the participating ranks.
        look: Function called during long waits, with all other ranks as its argument; may raise an error to end the
            wait.
        spins: Number of MPI polls before yielding.

    Attributes:
        number: Number of checks so far; the same on all ranks.
        counted: Number of ranks that passed `count=1` in the latest check.
    """

    def __init__(self, comms: MpiCommunicators, look: Callable[[Sequence[int]], object], spins: int) -> None:
        mpi = comms.mpi
        self._comms = comms
        self._spins = spins
        self._look = look
        self._rank = comms.own.Get_rank()
        self._size = comms.own.Get_size()
        self._words = bytearray(_WORDS.size)
        self._arguments = (mpi.IN_PLACE, [self._words, 3, mpi.UINT64_T], mpi.SUM)
        self._test: Callable[[], bool] = _yes
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self.number: int = 0
        self.counted: int = 0

    def check(self, word: int, deadline: float, rows: int = 0, count: int = 0) -> bool:
        """Return whether all ranks have reached this call, and their counts match.

        Args:
            word: 64 bits that identify this rank's call.
            deadline: Deadline on the library's clock.
            rows: Checksum of this rank's counts, from `rows_of`.
            count: This rank's contribution to `counted`: 0 or 1.

        Raises:
            CommTimeoutError: Not all ranks have arrived by the deadline. No further check is possible.
        """
        comms = self._comms
        if comms.broken is not None:
            raise comms.broken
        self.number += 1
        _WORDS.pack_into(self._words, 0, word, rows, count)
        try:
            with comms.turn:
                self._test = comms.own.Iallreduce(*self._arguments).Test if self._size > 1 else _yes
                # Poll a few times first, because ranks usually arrive at about the same time.
                over = any(self._test() for _ in range(_LOOKS))
            if not over:
                self._wait(deadline)
        except comms.mpi.Exception as error:
            raise comms.error_of(error) from error
        if comms.broken is not None:
            raise comms.broken
        sum_of_words, sum_of_rows, self.counted = _WORDS.unpack(self._words)
        return sum_of_words == word * self._size % _WORD and not sum_of_rows

    def _wait(self, deadline: float) -> None:
        turn = self._comms.turn
        began = clock.now()

        def done() -> bool:
            with turn:
                return bool(self._test())

        try:
            over = clock.poll_until(done, deadline, lambda: self._look(self._others), self._spins)
        except PeerLostError:
            # Poll again: the lost rank may have contributed to the allreduce before it left.
            if not clock.poll_until(done, clock.now() + _LAST_CONTRIBUTION_S, spins=self._spins):
                raise
            return
        if not over:
            waited = clock.now() - began
            raise CommTimeoutError(f"waited {waited:.1f} s for the other ranks", waited_s=waited)

    @cached_property
    def _given(self) -> list[int]:
        return [_factor(self._rank, other) for other in range(self._size)]

    @cached_property
    def _taken(self) -> list[int]:
        return [_factor(other, self._rank) for other in range(self._size)]

    def rows_of(self, sends: Sequence[int], receives: Sequence[int]) -> int:
        """Return the checksum of this rank's counts to and from each other rank."""
        given = sum(factor * count for factor, count in zip(self._given, sends, strict=True))
        taken = sum(factor * count for factor, count in zip(self._taken, receives, strict=True))
        return (given - taken) % _WORD


def word_of(fingerprint: Fingerprint) -> int:
    """Return 64 bits that identify a call, but not the call's number, because calls on the fast path have no number."""
    return hash_of(fingerprint.compared()[1:])


def _yes() -> bool:
    return True


def _factor(source: int, target: int) -> int:
    return xxhash.xxh3_64_intdigest(b"%d to %d" % (source, target)) | 1
