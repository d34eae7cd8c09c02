"""Recursive doubling: ranks exchange their partial results with peers at distances 1, 2, 4, ...

If p is not a power of two, some adjacent ranks form pairs; each pair first reduces to its first rank, and shares the
result at the end. Cost: log2(p) rounds, rounded down, with one message per rank. If p is not a power of two, there are
2 more rounds, with 1 more message per rank. Best for short messages. Source: Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from unisono.collectives.algorithms.butterfly import doubling, exchanges
from unisono.collectives.algorithms.fold import extra_ranks, folded
from unisono.collectives.algorithms.step import Cost, Step

__all__ = ["BALANCED", "chunks", "cost", "steps"]

BALANCED = True


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from folded(rank, size, 1, partial(exchanges, peer=doubling))


def cost(size: int, numel: int) -> Cost:
    doublings = size.bit_length() - 1
    extra = extra_ranks(size)
    return Cost(doublings + 2 * extra, doublings + extra, (doublings + extra) * numel)
