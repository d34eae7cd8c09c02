"""A hierarchy that adds in the gathering half, too."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import hierarchical
from unisono.collectives.algorithms.all_reduce.hierarchical import cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 0 of 2.*step 2: chunk 1 from rank 1 adds the contribution of rank 0 a second time"


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in hierarchical.steps(rank, size):
        yield step._replace(reduce=True)
