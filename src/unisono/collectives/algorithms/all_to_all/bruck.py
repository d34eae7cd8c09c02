"""Bruck all-to-all: in round k, all parts whose distance has bit k set move 2^k ranks ahead in one message.

A part's distance is the number of ranks from its source to its destination. Cost: log2(p) rounds, rounded up; each rank
sends about log2(p)/2 times the message. Best for short messages among many ranks. Only for parts of equal length.
Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE TPDS 8(11), 1997, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Step, in_order

__all__ = ["UNIFORM", "chunks", "cost", "steps"]

UNIFORM = True


def chunks(size: int) -> int:
    return 3 * size


def steps(rank: int, size: int) -> Iterator[Step]:
    for bit in range((size - 1).bit_length()):
        distance = 1 << bit
        ways = [way for way in range(size) if way & distance]
        to = (rank + distance) % size
        source = (rank - distance) % size
        sent = [_chunk(rank, way, way % distance, size) for way in ways]
        received = [_chunk(rank, way, way % (2 * distance), size) for way in ways]
        yield Step((in_order(to, sent),), (in_order(source, received),))


def _chunk(rank: int, way: int, travelled: int, size: int) -> int:
    """Return the chunk in which a rank keeps a part that has moved `travelled` of its `way` ranks so far.

    A part starts in the input, then alternates between scratch memory and its final place in the output.
    """
    if not travelled:
        return (rank + way) % size
    left = (way ^ travelled).bit_count()
    return size + (rank - way) % size if left % 2 == 0 else 2 * size + way


def cost(size: int, numel: int) -> Cost:
    rounds = (size - 1).bit_length()
    return Cost(rounds, rounds, sum(way.bit_count() for way in range(size)) * numel // size)
