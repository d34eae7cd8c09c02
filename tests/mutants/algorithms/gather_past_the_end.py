"""A gather that is correct for powers of two only: for other sizes its runs end after the last chunk."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.gather.binomial import cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "cost", "steps"]

COLLECTIVE = "gather"
ERROR = r"chunks 2 to 4 are out of range for 3 chunks"


def steps(rank: int, size: int) -> Iterator[Step]:
    for span in (1 << bit for bit in range((size - 1).bit_length())):
        if rank & span:
            yield Step(send=(Move(rank - span, rank, rank + span),))
            return
        if rank + span < size:
            yield Step(recv=(Move(rank + span, rank + span, rank + 2 * span),))
