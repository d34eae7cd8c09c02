"""Weighted: parts of any size, for example in proportion to the ranks' speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.data.indices import Indices, Places
from unisono.data.partitioner import Bound, Partitioner, fractions_of
from unisono.data.partitions.shuffled import Shuffled

__all__ = ["PARTITIONER", "Weighted"]


class Weighted(Partitioner):
    """Parts in proportion to weights, such as each rank's samples per second.

    Ranks make the same number of training steps if each rank's batch size is its share of the global batch (see
    `un.data.apportion`).

    Args:
        weights: One weight per part, 0 or more, such as samples per second; only the ratios matter. If None, the parts
            have the `sizes` of the `DataPartitioner`, or, in a sampler, equal shares.
        partition: The inner partitioner, which assigns the samples; `shuffled` if None.

    Balance: as guaranteed by the inner partitioner for shares in proportion to the weights.

    Raises:
        ValueError: A weight is negative or NaN, or all weights are 0. The number of weights differs from the number of
            parts (raised when samples are divided).

    Example:
        >>> ranks = [un.data.PartitionSampler(range(12), num_replicas=3, rank=r, partition=un.data.weighted([3, 2, 1]))
        ...          for r in range(3)]
        >>> [len(sampler) for sampler in ranks]
        [6, 4, 2]
    """

    def __init__(self, weights: Sequence[float] | None = None, partition: Partitioner | None = None) -> None:
        self._given = None if weights is None else [float(weight) for weight in weights]
        self._weights = None if self._given is None else fractions_of(self._given)
        self._inner = Shuffled() if partition is None else partition
        self.in_step: bool = weights is None

    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        return self._inner.order(count, shuffle, seed, epoch, self._shares(shares))

    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        return self._inner.divide(samples, self._shares(shares), seed)

    def bounds(self, samples: Indices, shares: Sequence[float]) -> list[Bound]:
        return self._inner.bounds(samples, self._shares(shares))

    def together(self, samples: torch.Tensor) -> torch.Tensor | None:
        return self._inner.together(samples)

    def settings(self) -> dict[str, Any]:
        return {"weights": self._given}

    def replaced(self, settings: dict[str, Any]) -> Weighted:
        return Weighted(settings["weights"], self._inner)

    def fingerprint(self) -> str:
        return f"Weighted {self._inner.fingerprint()}"

    def _shares(self, shares: Sequence[float]) -> Sequence[float]:
        if self._weights is None:
            return shares
        if len(self._weights) != len(shares):
            raise ValueError(
                f"there are {len(self._weights)} weights for {len(shares)} parts; pass one weight for each part"
            )
        return self._weights


PARTITIONER = Weighted
