"""Initial and final states of each collective, as sets of the ranks that contributed.

A set of ranks is an integer: bit r is rank r. Roots are rank 0.
"""

from __future__ import annotations

from collections.abc import Callable

from unisono.collectives.algorithms.step import Algorithm
from unisono.core.collective import FAMILIES, family_of

__all__ = ["COLLECTIVES", "chunks_of", "default_chunks", "goal", "start"]

COLLECTIVES = tuple(FAMILIES)


def start(collective: str, rank: int, chunk: int, size: int) -> int:
    """Return the ranks that have contributed to this chunk of this rank before the first step; 0 if none have.

    Example:
        >>> [start("all_gather", rank=1, chunk=chunk, size=3) for chunk in range(3)]
        [0, 2, 0]
    """
    family, mine = family_of(collective), 1 << rank
    if not family.contributes(rank, root=0):
        return 0
    if family.pairwise:
        return mine if chunk < size or chunk == size + rank else 0
    return mine if chunk == rank or not family.gathers else 0


def goal(collective: str, rank: int, chunk: int, size: int) -> int:
    """Return the ranks that must have contributed to this chunk of this rank at the end; 0 if any state may remain.

    Example:
        >>> [goal("reduce_scatter", rank=1, chunk=chunk, size=3) for chunk in range(3)]
        [0, 7, 0]
    """
    family, everyone = family_of(collective), (1 << size) - 1
    if family.pairwise:
        return 1 << (chunk - size) if chunk >= size else 0
    if not family.receives(rank, root=0) or (family.scatters and chunk != rank):
        return 0
    if family.gathers:
        return 1 << chunk
    return everyone if family.reduces or not family.moves else 1


def default_chunks(collective: str, size: int) -> int:
    """Return the number of chunks of a collective, unless its schedule sets it.

    Only all_reduce, reduce and broadcast schedules may set it; elsewhere a chunk is one rank's
    contribution or result.
    """
    family = family_of(collective)
    return 2 * size if family.pairwise else size if family.moves else 1


def chunks_of(schedule: Algorithm, collective: str, size: int) -> int:
    """Return the number of chunks that the steps of a schedule refer to, among `size` ranks.

    This is `schedule.chunks(size)` if there is such a function. Otherwise it is 2p for all_to_all, 1 for a barrier,
    and p for all other collectives.

    Args:
        schedule: An algorithm of the collective.
        collective: A name of `COLLECTIVES`.
        size: Number of ranks, from 1.

    Raises:
        ValueError: There is no such collective, nor a function `chunks`.

    Example:
        >>> from unisono.collectives.algorithms.all_reduce import ring, tree
        >>> chunks_of(ring, "all_reduce", 5), chunks_of(tree, "all_reduce", 5)
        (5, 1)
    """
    chunks: Callable[[int], int] | None = getattr(schedule, "chunks", None)
    return chunks(size) if chunks else default_chunks(collective, size)
