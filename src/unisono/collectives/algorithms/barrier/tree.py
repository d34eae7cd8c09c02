"""Tree barrier: tokens travel up a binomial tree to rank 0, and down again.

Cost: 2 log2(p) rounds, with log2(p) rounded up, but only 2(p-1) messages in total. Source: Mellor-Crummey and Scott,
"Algorithms for scalable synchronization on shared-memory multiprocessors", ACM TOCS 9(1), 1991, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.broadcast import binomial as broadcast
from unisono.collectives.algorithms.reduce import binomial as reduce
from unisono.collectives.algorithms.step import Cost, Step

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from reduce.steps(rank, size)
    yield from broadcast.steps(rank, size)


def cost(size: int, numel: int) -> Cost:
    depth = (size - 1).bit_length()
    return Cost(2 * depth, depth, depth * numel)
