"""A ring that stops one step before the last chunk has arrived."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import ring
from unisono.collectives.algorithms.all_reduce.ring import cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"step \d: after the last step, chunk \d lacks the contribution of rank"


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from list(ring.steps(rank, size))[:-1]
