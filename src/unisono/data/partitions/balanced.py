"""Balanced: parts of equal cost, such as the same number of tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self, get_args

import torch

from unisono.data.dataset_attributes import digest, numbers, of_dataset
from unisono.data.indices import Indices
from unisono.data.partitioner import AssignmentPartitioner, Bound

__all__ = ["PARTITIONER", "Balanced", "Method", "deal_evenly", "largest_first"]

Method = Literal["largest_first", "same_count", "runs"]


class Balanced(AssignmentPartitioner):
    """Parts of equal total cost, in tokens or seconds, say. If chosen by name, uses the dataset's `costs` or `lengths`.

    Args:
        costs: One cost per sample, finite, 0 or more.
        method: The guarantee:

            - "largest_first": balances only cost. The most expensive of p equal parts costs at most 4/3 - 1/(3p) times
              as much as the most expensive part of the best division, and no part costs more than share * (total + (p -
              1) * largest cost).
            - "same_count": also balances the number of samples (within one), so that ranks make the same number of
              training steps. Two parts' costs differ by at most the largest cost difference within a group, where the
              groups are p samples each, in order of cost, and zero costs fill the last group. Supports equal shares
              only.
            - "runs": each part is a run of adjacent samples. A part's cost differs from its share of the total by at
              most the cost of the most expensive sample.

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
    """Cut the samples into runs, at the points where the cumulative cost is closest to the cumulative share."""
    # If all costs are zero, balance the number of samples.
    weights = costs if bool(costs.any()) else torch.ones_like(costs)
    sums = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    ends = torch.tensor(list(shares), dtype=torch.float64, device="cpu").cumsum(0)[:-1] * sums[-1]
    after = torch.searchsorted(sums, ends).clamp(1, max(1, len(costs)))
    if not len(costs):
        return torch.empty(0, dtype=torch.int64, device="cpu")
    cuts = torch.where(ends - sums[after - 1] <= sums[after] - ends, after - 1, after)
    owners = torch.zeros(len(costs) + 1, dtype=torch.int64, device="cpu")
    return owners.index_add(0, cuts, torch.ones_like(cuts)).cumsum(0)[:-1]


def largest_first(costs: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """Assign costs to parts, largest first, each to the least loaded part; return the index of each cost's part.

    The method is from R. L. Graham, "Bounds on Multiprocessing Timing Anomalies" (SIAM J. Appl. Math. 17, 1969): the
    most loaded of p equal parts has at most 4/3 - 1/(3p) times the load of the most loaded part in the best division,
    and no part has more than share * (total + (p - 1) * largest). Cost: a sort, and one heap operation per cost.

    Args:
        costs: One-dimensional, 0 or more.
        shares: Shares of the parts, which sum to 1.

    Example:
        >>> largest_first(torch.tensor([7, 5, 4, 3, 1]), [0.5, 0.5]).tolist()
        [0, 1, 1, 0, 1]
    """
    order = costs.argsort(descending=True, stable=True)
    sorted_costs = costs[order].tolist()
    equal = len(set(shares)) == 1
    chosen = _by_heap(sorted_costs, len(shares)) if equal else _by_search(sorted_costs, shares)
    owners = torch.empty(len(costs), dtype=torch.int64, device="cpu")
    owners[order] = torch.tensor(chosen, dtype=torch.int64, device="cpu")
    return owners


def _by_heap(costs: Sequence[float], parts: int) -> list[int]:
    heap = [(0.0, part) for part in range(parts)]
    chosen = []
    for cost in costs:
        load, part = heap[0]
        chosen.append(part)
        heapq.heapreplace(heap, (load + cost, part))
    return chosen


def _by_search(costs: Sequence[float], shares: Sequence[float]) -> list[int]:
    loads = {part: 0.0 for part, share in enumerate(shares) if share > 0}
    chosen = []
    for cost in costs:
        part = min(loads, key=lambda candidate: (loads[candidate] + cost) / shares[candidate])
        chosen.append(part)
        loads[part] += cost
    return chosen


def deal_evenly(costs: torch.Tensor, parts: int) -> tuple[torch.Tensor, float]:
    """Return the index of each cost's part, and a bound on how far the parts' loads differ.

    Two parts' numbers of costs differ by at most one.

    The samples are sorted by cost and cut into groups of `parts` samples. Each group gives one sample to every part;
    the most expensive sample goes to the least loaded part. Two parts' loads differ by at most the largest difference
    between the first and last cost of a group, where zero costs fill the last group.

    Example:
        >>> owners, apart = deal_evenly(torch.tensor([9, 8, 7, 3, 2, 2]), 2)
        >>> owners.tolist(), apart
        ([0, 1, 1, 0, 0, 1], 4)
    """
    order = costs.argsort(descending=True, stable=True)
    listed = costs[order].tolist()
    loads = [0.0] * parts
    chosen: list[int] = []
    apart = 0.0
    for start in range(0, len(listed), parts):
        run = listed[start : start + parts]
        least_loaded = sorted(range(parts), key=lambda part: loads[part])[: len(run)]
        for part, cost in zip(least_loaded, run, strict=True):
            loads[part] += cost
        chosen += least_loaded
        apart = max(apart, run[0] - (run[-1] if len(run) == parts else 0.0))
    owners = torch.empty(len(costs), dtype=torch.int64, device="cpu")
    owners[order] = torch.tensor(chosen, dtype=torch.int64, device="cpu")
    return owners, apart


PARTITIONER = Balanced
