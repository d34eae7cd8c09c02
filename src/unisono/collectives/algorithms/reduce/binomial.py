"""Binomial reduce: ranks pair up, one of each pair continues with their reduction, up to rank 0.

Cost: log2(p) rounds, rounded up; every rank sends its message once. Source: Thakur, Rabenseifner and
Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["chunks", "cost", "steps"]


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    for bit in range((size - 1).bit_length()):
        span = 1 << bit
        if rank & span:
            yield Step(send=(Move(rank - span, 0, 1),))
            return
        if rank + span < size:
            yield Step(recv=(Move(rank + span, 0, 1),), reduce=True)


def cost(size: int, numel: int) -> Cost:
    return Cost((size - 1).bit_length(), 1, numel)
