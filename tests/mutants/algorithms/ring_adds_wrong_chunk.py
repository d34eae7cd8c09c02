"""A ring that adds received data to the chunk next to the correct one."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce.ring import cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"step 1: chunk \d is expected from rank \d, which in its step 1 sends chunk"


def steps(rank: int, size: int) -> Iterator[Step]:
    left, right = (rank - 1) % size, (rank + 1) % size
    for back in range(2 * (size - 1)):
        out, into = (rank - back) % size, (rank - back) % size
        yield Step((Move(right, out, out + 1),), (Move(left, into, into + 1),), reduce=back < size - 1)
