"""Halving and doubling that ignores the ranks beyond a power of two."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import halving_doubling
from unisono.collectives.algorithms.all_reduce.halving_doubling import chunks, cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 0 of 3.*after the last step, chunk 0 lacks the contribution of rank 2"


def steps(rank: int, size: int) -> Iterator[Step]:
    known = chunks(size)
    if rank < known:
        yield from halving_doubling.steps(rank, known)
