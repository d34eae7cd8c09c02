"""Runs algorithms for powers of two on any number of ranks: pairs reduce first, and share the result at the end.

A node is a pair or a single rank. The pairs are the deepest leaves of the balanced binary tree over all ranks. If an
algorithm reduces over the nodes in a balanced tree, the whole reduction is balanced for any number of ranks.
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
    """Return whether the number of ranks is not a power of two."""
    return size != nodes_of(size)


@lru_cache(maxsize=16)
def heads(size: int) -> tuple[int, ...]:
    """Return the first rank of each node, followed by the number of ranks. A node is one or two adjacent ranks.

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
    """Return a rank's steps in an algorithm for powers of two, extended to any number of ranks.

    Args:
        rank, size: This rank, and the number of ranks.
        chunks: Number of chunks in the message.
        among: Function that returns a node's steps in the algorithm for powers of two, given the node's number and the
            number of nodes.
        scattered: Whether each rank's result is only the chunk with the rank's number, as in a reduce_scatter.
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
