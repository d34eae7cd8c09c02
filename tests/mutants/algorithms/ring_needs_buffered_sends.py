"""A ring that sends in one step and receives in the next: correct only if sends are buffered."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import ring
from unisono.collectives.algorithms.all_reduce.ring import cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = (
    r"deadlock of waiting ranks: rank 0 in its step 1 to send chunk 1 to rank 1, .*; rank 1 .* send chunk 0 to rank 0"
)


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in ring.steps(rank, size):
        yield Step(send=step.send)
        yield Step(recv=step.recv, reduce=step.reduce)
