"""A correct tree that ignores that rank 0 sends the result to several ranks."""

from __future__ import annotations

from unisono.collectives.algorithms.all_reduce import binomial
from unisono.collectives.algorithms.all_reduce.binomial import chunks, steps
from unisono.collectives.algorithms.step import Cost

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"cost declares 1 of 1 elements sent; counted are 2"


def cost(size: int, numel: int) -> Cost:
    return Cost(*binomial.cost(size, numel)[:2], numel)
