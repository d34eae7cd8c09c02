"""Dissemination barrier: in each round, every rank notifies a peer at twice the previous distance.

Cost: log2(p) rounds, rounded up, which is the minimum; each rank sends one token per round. Source: Hensgen, Finkel and
Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    for bit in range((size - 1).bit_length()):
        distance = 1 << bit
        to = (rank + distance) % size
        source = (rank - distance) % size
        yield Step((Move(to, 0, 1),), (Move(source, 0, 1),), reduce=True)


def cost(size: int, numel: int) -> Cost:
    rounds = (size - 1).bit_length()
    return Cost(rounds, rounds, rounds * numel)
