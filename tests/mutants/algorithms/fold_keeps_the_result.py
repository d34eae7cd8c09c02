"""A fold whose second ranks end before the result returns."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import recursive_doubling
from unisono.collectives.algorithms.all_reduce.recursive_doubling import chunks, cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 0 of 3.*step 3: waits to send chunk 0 to rank 1, which ended after its step 1"


def steps(rank: int, size: int) -> Iterator[Step]:
    found = list(recursive_doubling.steps(rank, size))
    yield from found[: 1 if not found[0].recv else None]
