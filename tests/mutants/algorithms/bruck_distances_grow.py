"""Bruck's reduce_scatter with distances that grow instead of shrinking."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.reduce_scatter import bruck
from unisono.collectives.algorithms.reduce_scatter.bruck import cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "reduce_scatter"
ERROR = r"rank 0 of 4.*step 2: after the last step, chunk 0 lacks the contribution of rank 1; it was last received"


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from reversed(list(bruck.steps(rank, size)))
