"""Ring all-reduce: each chunk travels around the ring twice, first to be reduced, then to be broadcast.

Cost: 2(p-1) rounds; each rank sends 2(p-1)/p of the message, which is the minimum. Best for long messages. Source:
Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009; popularized
in deep learning by Baidu in 2017.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    left = (rank - 1) % size
    right = (rank + 1) % size
    for back in range(1, 2 * size - 1):
        out = (rank - back) % size
        into = (rank - back - 1) % size
        yield Step((Move(right, out, out + 1),), (Move(left, into, into + 1),), reduce=back < size)


def cost(size: int, numel: int) -> Cost:
    return Cost(2 * (size - 1), 2 * (size - 1), 2 * numel - numel // size - (numel + 1) // size)
