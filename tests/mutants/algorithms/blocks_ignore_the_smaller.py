"""Binary blocks in which no block adds what the next smaller one sends."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import halving_doubling_blocks
from unisono.collectives.algorithms.all_reduce.halving_doubling_blocks import chunks, cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = (
    r"rank 0 of 3.*step 2: deadlock of waiting ranks: .*; rank 2 in its step 1 to send chunk 0 to rank 0, which is in"
)


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in halving_doubling_blocks.steps(rank, size):
        if step.send or not step.reduce:
            yield step
