"""What each collective starts from and must end with, as sets of the ranks that contributed.

A set of ranks is an integer: bit r stands for rank r. Roots are rank 0.
"""

from __future__ import annotations

from collections.abc import Callable

from unisono.schedules.step import Schedule

__all__ = ["COLLECTIVES", "chunks_of", "default_chunks", "goal", "start"]

COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)


def start(collective: str, rank: int, chunk: int, size: int) -> int:
    """Who has contributed to this chunk of this rank before the first step; 0 where it holds nothing.

    Example:
        >>> [start("all_gather", rank=1, chunk=chunk, size=3) for chunk in range(3)]
        [0, 2, 0]
    """
    mine = 1 << rank
    match collective:
        case "all_reduce" | "reduce" | "reduce_scatter" | "barrier":
            return mine
        case "broadcast" | "scatter":
            return mine if rank == 0 else 0
        case "gather" | "all_gather":
            return mine if chunk == rank else 0
        case "all_to_all":
            return mine if chunk < size or chunk == size + rank else 0
        case _:
            raise ValueError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")


def goal(collective: str, rank: int, chunk: int, size: int) -> int:
    """Who must have contributed to this chunk of this rank in the end; 0 where anything may be left.

    Example:
        >>> [goal("reduce_scatter", rank=1, chunk=chunk, size=3) for chunk in range(3)]
        [0, 7, 0]
    """
    root, everyone = 1, (1 << size) - 1
    match collective:
        case "all_reduce" | "barrier":
            return everyone
        case "reduce":
            return everyone if rank == 0 else 0
        case "reduce_scatter":
            return everyone if chunk == rank else 0
        case "broadcast":
            return root
        case "scatter":
            return root if chunk == rank else 0
        case "gather":
            return 1 << chunk if rank == 0 else 0
        case "all_gather":
            return 1 << chunk
        case "all_to_all":
            return 1 << (chunk - size) if chunk >= size else 0
        case _:
            raise ValueError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")


def default_chunks(collective: str, size: int) -> int:
    """How many chunks a collective has unless its schedule says otherwise.

    Only all_reduce, reduce and broadcast may say otherwise; elsewhere a chunk is what one rank
    gives or gets.
    """
    return {"all_to_all": 2 * size, "barrier": 1}.get(collective, size)


def chunks_of(schedule: Schedule, collective: str, size: int) -> int:
    """The number of chunks that the steps of a schedule speak of, among `size` ranks.

    Example:
        >>> from unisono.schedules.all_reduce import ring, tree
        >>> chunks_of(ring, "all_reduce", 5), chunks_of(tree, "all_reduce", 5)
        (5, 1)
    """
    chunks: Callable[[int], int] | None = getattr(schedule, "chunks", None)
    return chunks(size) if chunks else default_chunks(collective, size)
