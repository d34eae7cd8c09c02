"""Numbering of the ranks on each host, for algorithms whose steps depend on the hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from unisono.collectives.algorithms.step import Cost, Step, elements

__all__ = ["counted", "first_ranks", "place_of"]


def first_ranks(sizes: Sequence[int]) -> list[int]:
    """Return the first rank on each host.

    Example:
        >>> first_ranks((3, 1, 2))
        [0, 3, 4]
    """
    return [0, *accumulate(sizes[:-1])]


def place_of(rank: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the number of a rank's host, and the rank's number on that host.

    Example:
        >>> place_of(4, (3, 1, 2))
        (2, 0)
    """
    firsts = first_ranks(sizes)
    host = max(number for number, first in enumerate(firsts) if first <= rank)
    return host, rank - firsts[host]


def counted(rounds: int, steps: Callable[[int], Iterator[Step]], size: int, numel: int, chunks: int) -> Cost:
    """Return the cost of an algorithm, found by counting every rank's messages and elements.

    Args:
        rounds: Number of steps on the longest chain of messages.
        steps: Function that returns a rank's steps.
        size, numel, chunks: Number of ranks, of elements in the message, and of chunks in the message.
    """
    sent = [[move for step in steps(rank) for move in step.send] for rank in range(size)]
    most = max(sum(elements(numel, chunks, *run) for move in moves for run in move.runs) for moves in sent)
    return Cost(rounds, max(map(len, sent)), most)
