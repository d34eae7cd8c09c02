"""A correct ring that declares half of its rounds."""

from __future__ import annotations

from unisono.collectives.algorithms.all_reduce import ring
from unisono.collectives.algorithms.all_reduce.ring import steps
from unisono.collectives.algorithms.step import Cost

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"cost declares 1 rounds; counted are 2"


def cost(size: int, numel: int) -> Cost:
    return ring.cost(size, numel)._replace(rounds=size - 1)
