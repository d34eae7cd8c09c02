"""A reduce in which rank 1 sends its part twice, to a root that has ended."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.reduce import binomial
from unisono.collectives.algorithms.reduce.binomial import chunks, cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "reduce"
ERROR = r"rank 1 of 2.*step 2: waits to send chunk 0 to rank 0, which ended after its step 1"


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from binomial.steps(rank, size)
    if rank == 1:
        yield Step(send=(Move(0, 0, 1),))
