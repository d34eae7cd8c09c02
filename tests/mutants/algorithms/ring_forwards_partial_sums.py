"""A ring whose second lap starts one chunk too early, so that it forwards partial sums."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce.ring import cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"after the last step, chunk \d lacks the contribution of rank"


def steps(rank: int, size: int) -> Iterator[Step]:
    left, right = (rank - 1) % size, (rank + 1) % size
    for lap, first in ((True, rank - 1), (False, rank - 1)):
        for back in range(size - 1):
            out, into = (first - back) % size, (first - back - 1) % size
            yield Step((Move(right, out, out + 1),), (Move(left, into, into + 1),), reduce=lap)
