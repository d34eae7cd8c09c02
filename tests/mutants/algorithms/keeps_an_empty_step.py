"""A broadcast that keeps a place for what it does not send."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.broadcast import binomial
from unisono.collectives.algorithms.broadcast.binomial import chunks, cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "COMPLAINT", "chunks", "cost", "steps"]

COLLECTIVE = "broadcast"
COMPLAINT = r"step 2: nothing moves; leave the step out"


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from binomial.steps(rank, size)
    yield Step()
