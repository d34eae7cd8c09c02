"""A barrier one round short: a rank may leave before another has arrived."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.barrier import dissemination
from unisono.collectives.algorithms.barrier.dissemination import cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "barrier"
ERROR = r"after the last step, chunk 0 lacks the contribution of rank"


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from list(dissemination.steps(rank, size))[:-1]
