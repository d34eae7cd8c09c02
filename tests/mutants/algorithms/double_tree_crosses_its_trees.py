"""A double binary tree in which messages of one tree go to the peers of the other."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import double_binary_tree
from unisono.collectives.algorithms.all_reduce.double_binary_tree import chunks, cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 0 of 3.*step 1: chunk 4 is expected from rank 2, which in its step 1 sends chunk 0"


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in double_binary_tree.steps(rank, size):
        crossed = [move._replace(peer=other.peer) for move, other in zip(step.send, reversed(step.send), strict=True)]
        yield step._replace(send=tuple(crossed))
