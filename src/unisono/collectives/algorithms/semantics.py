"""Initial and final states of each collective, as sets of contributions, and the order of sums.

A set is an integer. Bit r is the contribution of rank r; in an all_to_all of p ranks, bit s*p+d is that of rank s to
rank d. Roots are rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from unisono.core.collective import FAMILIES, family_of

__all__ = ["COLLECTIVES", "FREE_CHUNKS", "balanced", "default_chunks", "goal", "start"]

T = TypeVar("T")

COLLECTIVES = tuple(FAMILIES)

FREE_CHUNKS = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives whose algorithms choose the number of chunks."""


def start(collective: str, rank: int, chunk: int, size: int) -> int:
    """Return the contributions in this chunk of this rank before the first step; 0 if there are none.

    Example:
        >>> [start("all_gather", rank=1, chunk=chunk, size=3) for chunk in range(3)]
        [0, 2, 0]
    """
    family, mine = family_of(collective), 1 << rank
    if not family.contributes(rank, root=0):
        return 0
    if family.pairwise:
        part = rank if chunk == size + rank else chunk
        return 1 << (rank * size + part) if part < size else 0
    return mine if chunk == rank or not family.gathers else 0


def goal(collective: str, rank: int, chunk: int, size: int) -> int:
    """Return the contributions that must be in this chunk of this rank at the end; 0 if any state may remain.

    Example:
        >>> [goal("reduce_scatter", rank=1, chunk=chunk, size=3) for chunk in range(3)]
        [0, 7, 0]
    """
    family, everyone = family_of(collective), (1 << size) - 1
    if family.pairwise:
        return 1 << ((chunk - size) * size + rank) if size <= chunk < 2 * size else 0
    if not family.receives(rank, root=0) or (family.scatters and chunk != rank):
        return 0
    if family.gathers:
        return 1 << chunk
    return everyone if family.reduces or not family.moves else 1


def default_chunks(collective: str, size: int) -> int:
    """Return the number of chunks of a collective, unless its algorithm sets it.

    Except in the collectives of `FREE_CHUNKS`, a chunk is one rank's contribution or result.

    Example:
        >>> default_chunks("all_reduce", 5), default_chunks("all_to_all", 5), default_chunks("barrier", 5)
        (5, 10, 1)
    """
    family = family_of(collective)
    return 2 * size if family.pairwise else size if family.moves else 1


def balanced(parts: Sequence[T], plus: Callable[[T, T], T]) -> T:
    """Reduce parts in a balanced binary tree, in which the first half is the longer one.

    Args:
        parts: At least one.
        plus: Reduces two parts, the earlier one first.

    Example:
        >>> balanced("abcde", lambda low, high: f"({low}+{high})")
        '(((a+b)+c)+(d+e))'
    """
    if len(parts) < 3:
        return parts[0] if len(parts) == 1 else plus(*parts)
    half = (len(parts) + 1) // 2
    return plus(balanced(parts[:half], plus), balanced(parts[half:], plus))
