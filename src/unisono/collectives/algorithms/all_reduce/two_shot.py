"""Two-shot all-reduce: each rank reduces one chunk from all ranks, then sends the result to all other ranks.

Cost: 2 rounds; each rank sends 2(p-1)/p of the message, which is the minimum, and receives p - 1 messages at the same
time. Best if all ranks are equally well connected, as on one host.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_gather import direct as all_gather
from unisono.collectives.algorithms.reduce_scatter import direct as reduce_scatter
from unisono.collectives.algorithms.step import Cost, Step, elements

__all__ = ["BALANCED", "cost", "steps"]

BALANCED = True


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from reduce_scatter.steps(rank, size)
    yield from all_gather.steps(rank, size)


def cost(size: int, numel: int) -> Cost:
    return Cost(2, 2 * (size - 1), numel + (size - 2) * elements(numel, size))
