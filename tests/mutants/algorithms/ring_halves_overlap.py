"""A bidirectional ring that sends the same half of the message both ways."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import bidirectional_ring
from unisono.collectives.algorithms.all_reduce.bidirectional_ring import chunks, cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 0 of 2.*step 2: chunk 1 is overwritten while it is sent"


def steps(rank: int, size: int) -> Iterator[Step]:
    def first_half(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(Move(move.peer, move.start % size, move.start % size + 1) for move in moves)

    for step in bidirectional_ring.steps(rank, size):
        yield Step(first_half(step.send), first_half(step.recv), step.reduce)
