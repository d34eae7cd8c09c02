"""An all-to-all in which every rank sends the chunk that it should keep."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_to_all import pairwise
from unisono.collectives.algorithms.all_to_all.pairwise import cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "all_to_all"
ERROR = (
    r"rank 0 of 2.*chunk 3 lacks the contribution of rank 1 to rank 0, wrongly has the contribution of rank 1 to rank 1"
)


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in pairwise.steps(rank, size):
        yield Step(tuple(Move(move.peer, rank, rank + 1) for move in step.send), step.recv)
