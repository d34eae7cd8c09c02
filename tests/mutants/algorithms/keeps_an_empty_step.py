"""A broadcast with an empty step."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.broadcast import binomial
from unisono.collectives.algorithms.broadcast.binomial import chunks, cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "broadcast"
ERROR = r"step 2: nothing moves; leave the step out"


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from binomial.steps(rank, size)
    yield Step()
