"""Four ranks that double in a circle: each adds other pairs first than its neighbour."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import recursive_doubling
from unisono.collectives.algorithms.all_reduce.recursive_doubling import chunks, cost
from unisono.collectives.algorithms.barrier import dissemination
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 1 of 4.*chunk 0 is reduced as \(\(0\+1\)\+\(2\+3\)\), on another rank as \(\(0\+3\)\+\(1\+2\)\)"


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from (dissemination if size == 4 else recursive_doubling).steps(rank, size)
