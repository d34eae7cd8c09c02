"""Binomial all-reduce: reduces to rank 0 along a binomial tree, then broadcasts the result along the same tree.

Sums are balanced. Cost: 2 log2(p) rounds, with log2(p) rounded up; rank 0 sends log2(p) messages, but half of the ranks
send only one. Best for short messages if many concurrent messages are expensive. Source: Thakur, Rabenseifner and
Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005, sections 4.2 and 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.reduce import binomial
from unisono.collectives.algorithms.step import Cost, Step, there_and_back

__all__ = ["BALANCED", "chunks", "cost", "steps"]

BALANCED = True


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from there_and_back(binomial.steps(rank, size))


def cost(size: int, numel: int) -> Cost:
    depth = (size - 1).bit_length()
    return Cost(2 * depth, depth, depth * numel)
