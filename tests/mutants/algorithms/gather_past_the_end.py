"""A gather that is right for powers of two only: elsewhere its runs go past the last chunk."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.gather.binomial import cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "COMPLAINT", "cost", "steps"]

COLLECTIVE = "gather"
COMPLAINT = r"chunks 2 to 4 are out of range for 3 chunks"


def steps(rank: int, size: int) -> Iterator[Step]:
    for span in (1 << bit for bit in range((size - 1).bit_length())):
        if rank & span:
            yield Step(send=(Move(rank - span, rank, rank + span),))
            return
        if rank + span < size:
            yield Step(recv=(Move(rank + span, rank + span, rank + 2 * span),))
