"""Doubling in a circle: for other sizes than powers of two, the last round repeats contributions."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.barrier import dissemination
from unisono.collectives.algorithms.barrier.dissemination import cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 0 of 3.*step 2: chunk 0 from rank 1 adds the contribution of rank 0 a second time"


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from dissemination.steps(rank, size)
