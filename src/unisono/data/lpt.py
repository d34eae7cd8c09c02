"""Assignment of work to parts, so that all are about equally loaded."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

__all__ = ["deal_evenly", "largest_first"]


def largest_first(costs: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """Return the part number of each cost: largest first, each to the part that will then be least loaded.

    R. L. Graham, "Bounds on Multiprocessing Timing Anomalies" (SIAM J. Appl. Math. 17, 1969): the most loaded of
    p equal parts has at most 4/3 - 1/(3p) of what the best of all divisions could do. No part has more
    than share * (total + (p - 1) * largest). Costs a sort and one step of a heap each.

    Args:
        costs: One-dimensional, 0 or more.
        shares: Of the parts; they sum to 1.

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
    """For each cost the number of its part, where all parts get equally many; and how far apart their loads may be.

    Sorted by cost, each run of `parts` neighbours goes one to a part, the largest to the least loaded. Then two loads
    are never further apart than the first and the last of some run.

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
