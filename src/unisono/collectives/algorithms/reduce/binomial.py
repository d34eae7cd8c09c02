"""Binomial reduce: each half reduces to its first rank, recursively; then the second half's first rank sends to rank 0.

Sums are balanced for any number of ranks. Cost: log2(p) rounds, rounded up; each rank except the root sends one
message. Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19(1), 2005, section 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["BALANCED", "chunks", "cost", "steps"]

BALANCED = True


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    found = []
    first = 0
    stop = size
    while stop - first > 1:
        half = (first + stop + 1) // 2
        if rank == first:
            found.append(Step(recv=(Move(half, 0, 1),), reduce=True))
        elif rank == half:
            found.append(Step(send=(Move(first, 0, 1),)))
        first, stop = (first, half) if rank < half else (half, stop)
    yield from reversed(found)


def cost(size: int, numel: int) -> Cost:
    return Cost((size - 1).bit_length(), 1, numel)
