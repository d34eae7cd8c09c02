"""Binomial scatter: each rank repeatedly sends the upper half of its chunks, to peers at halving distances.

Cost: log2(p) rounds, rounded up; rank 0 sends (p-1)/p of the message. Source: Thakur, Rabenseifner
and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step, elements

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    for bit in reversed(range((size - 1).bit_length())):
        span = 1 << bit
        if rank % (2 * span) == span:
            yield Step(recv=(Move(rank - span, rank, min(rank + span, size)),))
        elif rank % (2 * span) == 0 and rank + span < size:
            yield Step(send=(Move(rank + span, rank + span, min(rank + 2 * span, size)),))


def cost(size: int, numel: int) -> Cost:
    depth = (size - 1).bit_length()
    return Cost(depth, depth, numel - elements(numel, size))
