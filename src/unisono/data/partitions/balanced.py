"""Balanced: parts of equal cost, such as equally many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self, get_args

import torch

from unisono.data.assignment import AssignmentPartitioner
from unisono.data.dataset_attributes import digest, numbers, of_dataset
from unisono.data.indices import Indices
from unisono.data.lpt import deal_evenly, largest_first
from unisono.data.partitioner import Bound

__all__ = ["PARTITIONER", "Balanced", "Method"]

Method = Literal["largest_first", "same_count", "runs"]


class Balanced(AssignmentPartitioner):
    """Parts of equal cost: tokens, frames, seconds. By name: the dataset's `costs` or `lengths`.

    Args:
        costs: One for each sample, finite, 0 or more.
        method: The guarantee:

            - "largest_first": of cost alone; the most loaded of p equal parts has at most 4/3 - 1/(3p) of the cost
              that the best division gives it, and no part has more than share * (total + (p - 1) * largest cost).
            - "same_count": equally many samples too (but for one), so that ranks make equally many steps.
              Loads are apart by no more than neighbours in the sorted costs are, p - 1 places apart. Equal shares only.
            - "runs": each part is a run of neighbouring samples; its cost is less than the largest cost
              away from its share.

    Raises:
        ValueError: A cost is negative or not finite, `costs` are not one-dimensional, or `method` is unknown.

    Example:
        >>> lengths, halves = [7, 5, 4, 3, 1], [0.5, 0.5]
        >>> [sum(part) for part in un.data.DataPartitioner(lengths, halves, partition=un.data.balanced(lengths))]
        [10, 10]
        >>> runs = un.data.balanced(lengths, "runs")
        >>> [list(part) for part in un.data.DataPartitioner(lengths, halves, partition=runs, shuffle=False)]
        [[7, 5], [4, 3, 1]]
    """

    def __init__(self, costs: Iterable[float], method: Method = "largest_first") -> None:
        if method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, not {method!r}")
        super().__init__(numbers(costs, "costs"), "costs")
        self._method = method

    @classmethod
    def of(cls, dataset: Any) -> Self:
        return cls(of_dataset(dataset, ("costs", "lengths"), "balanced"))

    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        costs = self._known[samples]
        if self._method == "runs":
            return _runs(costs, shares)
        if self._method == "same_count":
            if len(set(shares)) != 1:
                raise ValueError("method='same_count' makes equal parts only; use 'largest_first' for other shares")
            return deal_evenly(costs, len(shares))[0]
        return largest_first(costs, shares)

    def bounds(self, samples: Indices, shares: Sequence[float]) -> list[Bound]:
        costs = self._known[samples.all()]
        total = float(costs.sum())
        largest = float(costs.max()) if len(costs) else 0.0
        if self._method == "runs":
            return [Bound.around("cost", self._cost, total, shares, largest)]
        if self._method == "same_count":
            apart = deal_evenly(costs, len(shares))[1]
            by_count = Bound.around("samples", len, len(samples), shares, 1)
            return [Bound.around("cost", self._cost, total, shares, apart), by_count]
        most = [share * (total + (len(shares) - 1) * largest) + 1e-6 + 1e-9 * total for share in shares]
        return [Bound("cost", self._cost, [0.0] * len(shares), most)]

    def fingerprint(self) -> str:
        return f"Balanced {self._method} {digest(self._known)}"

    def _cost(self, samples: torch.Tensor) -> float:
        return float(self._known[samples].sum())


def _runs(costs: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """Cut where the sum of all before comes nearest to the shares of all parts before."""
    # Without costs, samples are what is shared.
    weights = costs if bool(costs.any()) else torch.ones_like(costs)
    sums = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    ends = torch.tensor(list(shares), dtype=torch.float64, device="cpu").cumsum(0)[:-1] * sums[-1]
    after = torch.searchsorted(sums, ends).clamp(1, max(1, len(costs)))
    if not len(costs):
        return torch.empty(0, dtype=torch.int64, device="cpu")
    cuts = torch.where(ends - sums[after - 1] <= sums[after] - ends, after - 1, after)
    owners = torch.zeros(len(costs) + 1, dtype=torch.int64, device="cpu")
    return owners.index_add(0, cuts, torch.ones_like(cuts)).cumsum(0)[:-1]


PARTITIONER = Balanced
