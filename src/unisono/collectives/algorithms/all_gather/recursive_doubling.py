"""Recursive doubling: ranks exchange all chunks that they have with peers at distances 1, 2, 4, ...

The number of ranks must be a power of two. Cost: log2(p) rounds; each rank sends (p-1)/p of the message. Source:
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005,
section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.butterfly import needs_power_of_two
from unisono.collectives.algorithms.step import Cost, Move, Step, elements

__all__ = ["cost", "steps", "unsupported"]


unsupported = needs_power_of_two


def steps(rank: int, size: int) -> Iterator[Step]:
    for distance in (1 << bit for bit in range(size.bit_length() - 1)):
        peer = rank ^ distance
        mine = rank // distance * distance
        theirs = mine ^ distance
        yield Step((Move(peer, mine, mine + distance),), (Move(peer, theirs, theirs + distance),))


def cost(size: int, numel: int) -> Cost:
    doublings = size.bit_length() - 1
    return Cost(doublings, doublings, sum(elements(numel, size, 0, 1 << bit) for bit in range(doublings)))
