"""A rank forwards its result while another one is written over it."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import one_shot
from unisono.collectives.algorithms.all_reduce.one_shot import chunks, cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"step 2: chunk 0 is overwritten while it is sent"


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from one_shot.steps(rank, size)
    yield Step((Move((rank + 1) % size, 0, 1),), (Move((rank - 1) % size, 0, 1),))
