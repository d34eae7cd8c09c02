"""Direct reduce-scatter: every rank sends each owner its chunk in one step.

Cost: 1 round, (p-1)/p of the message; every rank receives p - 1 messages at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["BALANCED", "cost", "steps"]

BALANCED = True


def steps(rank: int, size: int) -> Iterator[Step]:
    others = [peer for peer in range(size) if peer != rank]
    if others:
        yield Step(
            tuple(Move(peer, peer, peer + 1) for peer in others),
            tuple(Move(peer, rank, rank + 1) for peer in others),
            reduce=True,
        )


def cost(size: int, numel: int) -> Cost:
    return Cost(1, size - 1, numel - numel // size)
