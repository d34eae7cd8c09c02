"""Linear scatter: the root sends every rank its chunk, all in one round.

Cost: 1 round, in which the root sends (p-1)/p of the message in p - 1 messages. Best for long messages, and for few
ranks. Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
experience", CCPE 19(13), 2007, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.gather import linear as gather
from unisono.collectives.algorithms.step import Cost, Step, elements, mirrored

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    return mirrored(gather.steps(rank, size))


def cost(size: int, numel: int) -> Cost:
    return Cost(1, size - 1, numel - elements(numel, size))
