"""A chunked ring that never passes on the last segment of a result."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import chunked_ring
from unisono.collectives.algorithms.all_reduce.chunked_ring import chunks, cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 0 of 2.*step 2: after the last step, chunk 3 lacks the contribution of rank 1; it was never received"


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in chunked_ring.steps(rank, size):
        yield step if step.reduce else Step(step.send[:-1], step.recv[:-1])
