"""Contiguous: each part is a run of adjacent samples, in file order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from unisono.data.feistel import IndexShuffle
from unisono.data.indices import Concatenated, Indices, Places, RangeIndices
from unisono.data.partitioner import Partitioner, apportion

__all__ = ["PARTITIONER", "Contiguous"]


class Contiguous(Partitioner):
    """Runs of adjacent samples. Samples are shuffled only within a run, so each rank keeps reading the same files.

    Balance: each part's length differs from its share by less than one sample. Cost: constant time and memory, for any
    number of samples.

    Example:
        >>> [list(part) for part in un.data.DataPartitioner(range(10), [0.5, 0.3, 0.2], partition="contiguous")]
        [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9]]
    """

    shuffles = False

    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        if not shuffle:
            return RangeIndices(count)
        lengths = apportion(count, shares)
        # Mix the part's number into the seed; otherwise, runs of equal length would all be shuffled in the same way.
        runs = [IndexShuffle(length, (seed << 20) + part, epoch) for part, length in enumerate(lengths)]
        return Concatenated(runs, [0, *accumulate(lengths)][:-1])

    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        ends = [0, *accumulate(apportion(len(samples), shares))]
        return [range(start, stop) for start, stop in pairwise(ends)]


PARTITIONER = Contiguous
