"""Ring all-reduce: each chunk goes round twice, first to collect, then to be known.

Cost: 2(p-1) rounds, 2(p-1)/p of the message, which is the least possible. Best for long messages.
Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69(2), 2009; made known to deep learning by Baidu in 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from unisono.schedules.all_gather import ring as all_gather
from unisono.schedules.reduce_scatter import ring as reduce_scatter
from unisono.schedules.step import Cost, Step

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from reduce_scatter.steps(rank, size)
    yield from all_gather.steps(rank, size)


def cost(size: int) -> Cost:
    return Cost(2 * (size - 1), Fraction(2 * (size - 1), size))
