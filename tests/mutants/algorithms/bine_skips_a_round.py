"""Bine butterfly that leaves out the second halving and its mirror."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import bine
from unisono.collectives.algorithms.all_reduce.bine import cost, unsupported
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps", "unsupported"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 0 of 4.*step 2: after the last step, chunk 0 lacks the contribution of ranks 2, 3"


def steps(rank: int, size: int) -> Iterator[Step]:
    found = list(bine.steps(rank, size))
    yield from found if size == 2 else [*found[:1], *found[2:-2], *found[-1:]]
