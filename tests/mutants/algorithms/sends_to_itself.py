"""A direct all-reduce that includes its own rank."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce.one_shot import chunks, cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"step 1: peer \d is not another of the \d ranks"


def steps(rank: int, size: int) -> Iterator[Step]:
    everyone = tuple(Move(peer, 0, 1) for peer in range(size))
    yield Step(everyone, everyone, reduce=True)
