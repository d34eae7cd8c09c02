"""Direct reduce-scatter: every rank sends each chunk to its owner in one step.

Cost: 1 round; each rank sends (p-1)/p of the message, and receives p - 1 messages at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step, others

__all__ = ["BALANCED", "cost", "steps"]

BALANCED = True


def steps(rank: int, size: int) -> Iterator[Step]:
    to, sources = others(rank, size)
    send = tuple(Move(peer, peer, peer + 1) for peer in to)
    yield Step(send, tuple(Move(peer, rank, rank + 1) for peer in sources), reduce=True)


def cost(size: int, numel: int) -> Cost:
    return Cost(1, size - 1, numel - numel // size)
