"""A scatter that adds received data to memory that no step has written."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.scatter import binomial
from unisono.collectives.algorithms.scatter.binomial import cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "scatter"
ERROR = r"rank 1 of 2.*step 1: chunk 1 is reduced into, but holds nothing yet"


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in binomial.steps(rank, size):
        yield Step(step.send, step.recv, reduce=True)
