"""Dirichlet: every part has a different mix of labels, like the devices in federated learning."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch

from unisono.data.dataset_attributes import codes, digest, of_dataset
from unisono.data.feistel import IndexShuffle
from unisono.data.partitioner import AssignmentPartitioner, apportion, fractions_of

__all__ = ["PARTITIONER", "Dirichlet"]


class Dirichlet(AssignmentPartitioner):
    """Parts with randomly drawn, different label mixes. If chosen by name, uses the dataset's `targets` or `labels`.

    Provisional: it may change in any minor version, without a deprecation.

    Args:
        labels: One label per sample: an integer tensor, or any hashable values.
        alpha: Concentration, more than 0. With a large value, parts are similar; with a small one, each part has about
            one label.

    Balance: each part's length differs from its share by less than one sample; only the labels are uneven. When a label
    runs out, a part gets samples with other labels instead, in proportion to its mix, so the last parts get the
    leftovers.

    Raises:
        ValueError: `alpha` is not finite and positive, or `labels` is a tensor that is not one-dimensional.

    Method: mixes are drawn from the distribution Dirichlet(alpha * the dataset's mix), as in Hsu, Qi and Brown,
    "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification" (2019).

    Example:
        >>> labels = torch.arange(1000) % 10
        >>> parts = un.data.DataPartitioner(labels, [0.25] * 4, partition=un.data.dirichlet(labels, alpha=0.1), seed=1)
        >>> [len(part) for part in parts]
        [250, 250, 250, 250]
        >>> largest = [max(torch.stack(list(part)).bincount().tolist()) for part in parts]
        >>> max(largest) > 50
        True
    """

    def __init__(self, labels: Iterable[Any], alpha: float = 0.5) -> None:
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"alpha must be finite and more than 0, but is {alpha}")
        super().__init__(codes(labels, "labels"), "labels")
        self._alpha = alpha

    @classmethod
    def of(cls, dataset: Any) -> Self:
        return cls(of_dataset(dataset, ("targets", "labels"), "dirichlet"))

    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        owners = torch.empty_like(samples)
        if not len(samples):
            return owners
        labels = self._known[samples]
        shuffled = IndexShuffle(len(samples), seed).all()
        left = labels.bincount().tolist()
        stacks = shuffled[labels[shuffled].argsort(stable=True)].split(left)
        chance = random.Random(seed)
        used = [0] * len(left)
        concentration = [self._alpha * count / len(samples) for count in left]
        for part, size in enumerate(apportion(len(samples), shares)):
            for label, count in enumerate(_filled(size, left, _mix(concentration, chance))):
                owners[stacks[label][used[label] : used[label] + count]] = part
                used[label] += count
                left[label] -= count
        return owners

    def fingerprint(self) -> str:
        return f"Dirichlet {self._alpha} {digest(self._known)}"


def _mix(concentration: Sequence[float], chance: random.Random) -> list[float]:
    """Draw from a Dirichlet distribution, with logarithms of gamma variates, because small variates would underflow."""
    logs = [
        math.log(chance.gammavariate(a + 1, 1)) + math.log(1 - chance.random()) / a if a else -math.inf
        for a in concentration
    ]
    top = max(logs)
    return [math.exp(log - top) for log in logs]


def _filled(size: int, left: Sequence[int], mix: Sequence[float]) -> list[int]:
    """Return how many samples of each label to take, `size` in total, following the mix until labels run out."""
    taken = [0] * len(left)
    while need := size - sum(taken):
        free = [have - count for have, count in zip(left, taken, strict=True)]
        desired = [weight if have else 0.0 for weight, have in zip(mix, free, strict=True)]
        weights = fractions_of(desired if any(desired) else free)
        for label, count in enumerate(apportion(need, weights)):
            taken[label] += min(count, free[label])
    return taken


PARTITIONER = Dirichlet
