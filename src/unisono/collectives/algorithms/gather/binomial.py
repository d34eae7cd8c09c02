"""Binomial gather: in each round, one rank of each pair sends all its chunks to the other, until rank 0 has all.

Cost: log2(p) rounds, rounded up; if p is a power of two, the busiest rank sends half of the message. Source: Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.scatter import binomial as scatter
from unisono.collectives.algorithms.step import Cost, Step, elements, mirrored

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    return mirrored(scatter.steps(rank, size))


def cost(size: int, numel: int) -> Cost:
    subtrees = ((rank, min(rank + (rank & -rank), size)) for rank in range(1, size))
    return Cost((size - 1).bit_length(), 1, max(elements(numel, size, *subtree) for subtree in subtrees))
