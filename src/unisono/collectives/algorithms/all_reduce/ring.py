"""Ring all-reduce: each chunk travels around the ring twice, first to be reduced, then to be broadcast.

Cost: 2(p-1) rounds; each rank sends 2(p-1)/p of the message, which is the minimum. Best for long messages. Source:
Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009; popularized
in deep learning by Baidu in 2017.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_gather import ring as all_gather
from unisono.collectives.algorithms.reduce_scatter import ring as reduce_scatter
from unisono.collectives.algorithms.step import Cost, Step

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from reduce_scatter.steps(rank, size)
    yield from all_gather.steps(rank, size)


def cost(size: int, numel: int) -> Cost:
    return Cost(2 * (size - 1), 2 * (size - 1), 2 * numel - numel // size - (numel + 1) // size)
