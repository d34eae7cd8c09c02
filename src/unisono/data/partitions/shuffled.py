"""Shuffled: a shuffled order, assigned to parts in turn."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.data.indices import Indices, Places
from unisono.data.partitions.contiguous import Contiguous
from unisono.data.partitions.strided import Strided

__all__ = ["PARTITIONER", "Shuffled"]


class Shuffled(Strided):
    """Order reshuffled each epoch, assigned to parts in turn. Suits most training.

    Part r of p equal parts has positions r, r + p, r + 2p and so on of the epoch's order, which is the same for any p.
    Unequal parts are runs of the shuffled order.

    Balance: less than one sample away from the share. Cost: none, for any number of samples (`IndexShuffle`).

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
