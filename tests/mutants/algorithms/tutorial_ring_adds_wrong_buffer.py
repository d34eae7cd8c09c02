"""A ring of whole messages that adds into the buffer that it passes on, instead of passing on what it received."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce.one_shot import chunks, cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 0 of 3.*step 2: chunk 0 from rank 2 adds the contribution of rank 2 a second time"


def steps(rank: int, size: int) -> Iterator[Step]:
    for _ in range(size - 1):
        yield Step((Move((rank + 1) % size, 0, 1),), (Move((rank - 1) % size, 0, 1),), reduce=True)
