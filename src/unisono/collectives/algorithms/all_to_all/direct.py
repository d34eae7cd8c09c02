"""Direct all-to-all: every rank exchanges data with every other rank in one step.

Cost: 1 round; each rank sends (p-1)/p of the message, and receives p - 1 messages at the same time. Best for short
messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step, others

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    to, sources = others(rank, size)
    send = tuple(Move(peer, peer, peer + 1) for peer in to)
    yield Step(send, tuple(Move(peer, size + peer, size + peer + 1) for peer in sources))


def cost(size: int, numel: int) -> Cost:
    return Cost(1, size - 1, numel - numel // size)
