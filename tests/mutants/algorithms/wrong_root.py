"""A broadcast from the last rank, which has nothing to send."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.broadcast import binomial
from unisono.collectives.algorithms.broadcast.binomial import chunks, cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "broadcast"
ERROR = r"rank 1 of 2.*step 1: chunk 0 is sent, but holds nothing yet"


def steps(rank: int, size: int) -> Iterator[Step]:
    def mirrored(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(Move(size - 1 - move.peer, move.start, move.stop) for move in moves)

    for step in binomial.steps(size - 1 - rank, size):
        yield Step(mirrored(step.send), mirrored(step.recv))
