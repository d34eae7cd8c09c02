"""Recursive halving in which ranks send the half that they should keep."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.reduce_scatter import recursive_halving
from unisono.collectives.algorithms.reduce_scatter.recursive_halving import cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "reduce_scatter"
ERROR = r"rank 0 of 2.*step 1: after the last step, chunk 0 lacks the contribution of rank 1; it was never received"


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in recursive_halving.steps(rank, size):
        yield Step(step.recv, step.send, step.reduce) if step.send and step.recv else step
