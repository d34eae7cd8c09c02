"""Binomial broadcast: in each round, ranks that have the message send it to peers at half the previous distance.

Cost: log2(p) rounds, rounded up; rank 0 sends one message per round. Best for short messages. Source: Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["chunks", "cost", "steps"]


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    for bit in reversed(range((size - 1).bit_length())):
        span = 1 << bit
        if rank % (2 * span) == span:
            yield Step(recv=(Move(rank - span, 0, 1),))
        elif rank % (2 * span) == 0 and rank + span < size:
            yield Step(send=(Move(rank + span, 0, 1),))


def cost(size: int, numel: int) -> Cost:
    depth = (size - 1).bit_length()
    return Cost(depth, depth, depth * numel)
