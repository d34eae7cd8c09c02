"""A barrier that sends without end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from unisono.collectives.algorithms.barrier import dissemination
from unisono.collectives.algorithms.barrier.dissemination import cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "barrier"
ERROR = r"that is more steps than any algorithm needs; does it ever end\?"


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from repeat(next(dissemination.steps(rank, size)))
