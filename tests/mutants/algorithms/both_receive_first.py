"""Two ranks that exchange, each of which receives before it sends."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import one_shot
from unisono.collectives.algorithms.all_reduce.one_shot import chunks, cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = (
    r"deadlock of waiting ranks: rank 0 .* to receive chunk 0 from rank 1, .*; rank 1 .* to receive chunk 0 from rank 0"
)


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in one_shot.steps(rank, size):
        yield Step(recv=step.recv, reduce=True)
        yield Step(send=step.send)
