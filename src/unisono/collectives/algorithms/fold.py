"""Folds any number of ranks to a power of two: pairs of adjacent ranks are reduced first, and share the result.

The pairs are the deepest leaves of the balanced binary tree over all ranks, so an algorithm that reduces its nodes in a
balanced tree does so for any number of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate

from unisono.collectives.algorithms.step import Move, Step

__all__ = ["extra_ranks", "folded", "heads", "nodes_of"]


def nodes_of(size: int) -> int:
    """Return the largest power of two that is not greater than the number of ranks."""
    return 1 << (size.bit_length() - 1)


def extra_ranks(size: int) -> bool:
    """True if the number of ranks is not a power of two."""
    return size != nodes_of(size)


@lru_cache(maxsize=16)
def heads(size: int) -> tuple[int, ...]:
    """Return the first rank of each node of one or two adjacent ranks, followed by the number of ranks.

    Example:
        >>> heads(6)
        (0, 2, 3, 5, 6)
    """
    parts = [size]
    while 2 * len(parts) <= size:
        parts = [half for part in parts for half in (part - part // 2, part // 2)]
    return tuple(accumulate(parts, initial=0))


def folded(
    rank: int, size: int, chunks: int, among: Callable[[int, int], Iterator[Step]], *, scattered: bool = False
) -> Iterator[Step]:
    """Return the steps, for any number of ranks, of an algorithm that serves only powers of two.

    Args:
        rank, size: As for the algorithm.
        chunks: Number of chunks in the message.
        among: Function that returns the steps of a node, given its number and the number of nodes.
        scattered: Whether each rank's result is only the chunk with its number.
    """
    first = heads(size)
    node = bisect_right(first, rank) - 1
    head = first[node]
    pair = first[node + 1] - first[node] == 2
    other = head if rank > head else head + 1
    whole = (Move(other, 0, chunks),)
    result = (Move(other, head + 1, head + 2) if scattered else Move(other, 0, chunks),)
    if rank > head:
        yield from (Step(send=whole), Step(recv=result))
        return
    if pair:
        yield Step(recv=whole, reduce=True)
    yield from (step.renumbered(first.__getitem__) for step in among(node, nodes_of(size)))
    if pair:
        yield Step(send=result)
