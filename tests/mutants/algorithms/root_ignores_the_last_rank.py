"""A linear reduce whose root does not wait for the last rank."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.reduce import linear
from unisono.collectives.algorithms.reduce.linear import chunks, cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "reduce"
ERROR = r"rank 2 of 3.*step 1: waits to send chunk 0 to rank 0, which ended after its step 1"


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in linear.steps(rank, size):
        yield step._replace(recv=step.recv[: max(1, size - 2)])
