"""Pairwise all-to-all: in round d, rank r sends to rank r + d and receives from rank r - d (modulo p).

Cost: p - 1 rounds; each rank sends (p-1)/p of the message, with only one message in flight in each direction at a time.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1),
2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    for distance in range(1, size):
        to = (rank + distance) % size
        source = (rank - distance) % size
        yield Step((Move(to, to, to + 1),), (Move(source, size + source, size + source + 1),))


def cost(size: int, numel: int) -> Cost:
    return Cost(size - 1, size - 1, numel - numel // size)
