"""Linear gather: every rank sends its chunk to the root, all in one round.

Cost: 1 round, in which the root receives (p-1)/p of the message in p - 1 messages. Best for long messages, and for few
ranks. Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
experience", CCPE 19(13), 2007, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step, elements

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    if rank:
        yield Step(send=(Move(0, rank, rank + 1),))
    elif size > 1:
        yield Step(recv=tuple(Move(peer, peer, peer + 1) for peer in range(1, size)))


def cost(size: int, numel: int) -> Cost:
    return Cost(1, 1, elements(numel, size, 1, 2))
