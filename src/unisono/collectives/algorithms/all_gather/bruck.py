"""Bruck all-gather: for d = 1, 2, 4, ..., each rank sends min(d, p - d) chunks to the rank d places before it.

Cost: log2(p) rounds, rounded up, for any number of ranks p; each rank sends (p-1)/p of the message. Source: Bruck, Ho,
Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems",
IEEE TPDS 8(11), 1997, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.reduce_scatter import bruck
from unisono.collectives.algorithms.step import Cost, Step, elements, wrapped

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    for distance, count in reversed(bruck.runs(size)):
        to = (rank - distance) % size
        source = (rank + distance) % size
        yield Step((wrapped(to, rank, count, size),), (wrapped(source, source, count, size),))


def cost(size: int, numel: int) -> Cost:
    rounds = bruck.runs(size)
    return Cost(len(rounds), len(rounds), sum(elements(numel, size, 0, count) for _, count in rounds))
