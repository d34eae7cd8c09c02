"""Bruck all-gather: each rank sends all that it has to the rank 1, 2, 4, ... before it.

Cost: log2(p) rounds, rounded up, (p-1)/p of the message, for any number of ranks. Source: Bruck, Ho, Kipnis, Upfal and
Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 8(11),
1997, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Step, elements, wrapped

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    for distance, count in _rounds(size):
        to = (rank - distance) % size
        source = (rank + distance) % size
        yield Step((wrapped(to, rank, count, size),), (wrapped(source, source, count, size),))


def _rounds(size: int) -> list[tuple[int, int]]:
    """Return the distance of each round, and how many chunks it moves."""
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    return [(distance, min(distance, size - distance)) for distance in distances]


def cost(size: int, numel: int) -> Cost:
    rounds = _rounds(size)
    return Cost(len(rounds), len(rounds), sum(elements(numel, size, 0, count) for _, count in rounds))
