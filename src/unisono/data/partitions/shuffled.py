"""Shuffled: a shuffled order, assigned to parts round-robin."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.data.indices import Indices, Places
from unisono.data.partitions.contiguous import Contiguous
from unisono.data.partitions.strided import Strided

__all__ = ["PARTITIONER", "Shuffled"]


class Shuffled(Strided):
    """Samples in an order that is reshuffled each epoch, assigned to parts round-robin. Suitable for most training.

    Part r of p equal parts has positions r, r + p, r + 2p and so on in the epoch's order, and this order is the same
    for any p. Unequal parts are contiguous runs of the shuffled order.

    Balance: each part's length is less than one sample away from its share. Cost: constant time and memory, for any
    number of samples (see `IndexShuffle`).

    Example:
        >>> parts = list(un.data.DataPartitioner(range(10), [0.5, 0.5], partition="shuffled"))
        >>> [len(part) for part in parts], sorted([*parts[0], *parts[1]]) == list(range(10))
        ([5, 5], True)
    """

    shuffles = True

    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        if len(set(shares)) == 1:
            return super().divide(samples, shares, seed)
        return Contiguous().divide(samples, shares, seed)


PARTITIONER = Shuffled
