"""The first and the last rank add their own parts first, so the last one adds in another order."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce.direct import chunks, cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 2 of 3.*chunk 0 is reduced in another order than on rank 0"


def steps(rank: int, size: int) -> Iterator[Step]:
    last = size - 1
    if rank in {0, last}:
        pair = (Move(last - rank, 0, 1),)
        yield Step(pair, pair, reduce=True)
    others = tuple(Move(peer, 0, 1) for peer in range(size) if peer != rank)
    middle = tuple(move for move in others if 0 < move.peer < last)
    if 0 < rank < last:
        yield Step(others, tuple(move for move in others if move.peer != last), reduce=True)
    elif middle:
        yield Step(middle if rank == 0 else (), middle, reduce=True)
