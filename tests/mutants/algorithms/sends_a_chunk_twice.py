"""A direct all-reduce whose message has its first chunk twice."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"step 1: chunk 0 is twice in one message"


def chunks(size: int) -> int:
    return 2


def steps(rank: int, size: int) -> Iterator[Step]:
    runs = tuple(Move(peer, 0, 2, ((0, 1),)) for peer in range(size) if peer != rank)
    yield Step(runs, runs, reduce=True)


def cost(size: int, numel: int) -> Cost:
    return Cost(1, size - 1, (size - 1) * numel)
