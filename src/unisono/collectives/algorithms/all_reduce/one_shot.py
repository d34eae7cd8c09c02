"""One-shot all-reduce: every rank sends its whole message to every other rank in one step.

Cost: 1 round, in which each rank sends p - 1 times the message. Best for tiny messages among up to about 8 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step, others

__all__ = ["BALANCED", "chunks", "cost", "steps"]

BALANCED = True


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    to, sources = others(rank, size)
    yield Step(tuple(Move(peer, 0, 1) for peer in to), tuple(Move(peer, 0, 1) for peer in sources), reduce=True)


def cost(size: int, numel: int) -> Cost:
    return Cost(1, size - 1, (size - 1) * numel)
