"""Correct with whole steps; with segmented messages, ranks 0 and 1 wait for each other's next segment."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import one_shot
from unisono.collectives.algorithms.all_reduce.one_shot import chunks, cost
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "all_reduce"
ERROR = r"deadlock of waiting ranks: rank 2 in its step 1 to send chunk 0 to rank 0, which is in its step 1"


def steps(rank: int, size: int) -> Iterator[Step]:
    for step in one_shot.steps(rank, size):
        if rank == 0:
            yield Step(step.send, step.recv[-1:], reduce=True)
            yield from [Step(recv=step.recv[:-1], reduce=True)] * (size > 2)
        else:
            yield step
