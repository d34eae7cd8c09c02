"""A broadcast in which rank 2 receives the message from two ranks at the same time."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "broadcast"
ERROR = r"rank 2 of 3.*step 1: chunk 0 is overwritten by two messages"


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    before, after = tuple(range(rank)), tuple(range(rank + 1, size))
    if before:
        yield Step(recv=tuple(Move(peer, 0, 1) for peer in before))
    if after:
        yield Step(send=tuple(Move(peer, 0, 1) for peer in after))


def cost(size: int, numel: int) -> Cost:
    return Cost(size - 1, size - 1, (size - 1) * numel)
