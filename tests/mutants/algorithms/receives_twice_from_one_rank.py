"""A direct all-reduce that sends its two halves as two messages of one step."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"step 1: two moves have the same peer and direction"


def chunks(size: int) -> int:
    return 2


def steps(rank: int, size: int) -> Iterator[Step]:
    runs = tuple(Move(peer, chunk, chunk + 1) for peer in range(size) if peer != rank for chunk in (0, 1))
    yield Step(runs, runs, reduce=True)


def cost(size: int) -> Cost:
    return Cost(1, Fraction(size - 1))
