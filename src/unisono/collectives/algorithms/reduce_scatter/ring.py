"""Ring reduce-scatter: each chunk travels around the ring once, is reduced on the way, and ends at its owner.

Every rank communicates only with its two neighbours, and all links are equally busy at all times. Cost: p - 1 rounds;
each rank sends (p-1)/p of the message, which is the minimum. Source: Patarasu and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", JPDC 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    left = (rank - 1) % size
    right = (rank + 1) % size
    for back in range(1, size):
        out = (rank - back) % size
        into = (rank - back - 1) % size
        yield Step((Move(right, out, out + 1),), (Move(left, into, into + 1),), reduce=True)


def cost(size: int, numel: int) -> Cost:
    return Cost(size - 1, size - 1, numel - numel // size)
