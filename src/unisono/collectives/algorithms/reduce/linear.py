"""Linear reduce: every rank sends its message to rank 0.

Cost: 1 round, in which rank 0 receives p - 1 messages at the same time. Source: "Basic linear" in Open MPI's tuned
collectives.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["BALANCED", "chunks", "cost", "steps"]

BALANCED = True


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    if rank:
        yield Step(send=(Move(0, 0, 1),))
    else:
        yield Step(recv=tuple(Move(peer, 0, 1) for peer in range(1, size)), reduce=True)


def cost(size: int, numel: int) -> Cost:
    return Cost(1, 1, numel)
