"""Collective algorithms by name: files `<collective>/<algorithm>.py` that handle integers, never tensors."""

from __future__ import annotations

from typing import Any

from unisono.collectives.algorithms.algorithm import COLLECTIVES, Algorithm, AlgorithmFile
from unisono.collectives.algorithms.step import Cost, Move, Step, elements, mirrored, move_of, others, wrapped
from unisono.core.registry import Registry

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "Algorithm",
    "AlgorithmFile",
    "Cost",
    "Move",
    "Step",
    "algorithm_of",
    "elements",
    "find",
    "mirrored",
    "move_of",
    "others",
    "serving",
    "wrapped",
]

ALGORITHMS: dict[str, Registry[AlgorithmFile]] = {
    collective: Registry(
        f"{collective} algorithm",
        f"unisono.collectives.algorithms.{collective}",
        group=f"unisono.algorithms.{collective}",
    )
    for collective in COLLECTIVES
}
"""Algorithm files by collective and name: `ALGORITHMS["all_reduce"]["ring"]`."""


def find(collective: str, name: str, **options: Any) -> Algorithm:
    """Return an algorithm by its name.

    Args:
        collective: A name in `COLLECTIVES`.
        name: A name in `ALGORITHMS[collective].names()`, optionally with options: "double_binary_tree:segments=8",
            "hierarchical:levels=8x128".
        options: Options of the algorithm, as listed in its file. They take precedence over options in `name`.

    Raises:
        ValueError: The collective, algorithm or option is unknown (the error lists the known names), or an option's
            value is not an integer.

    Example:
        >>> find("all_reduce", "ring").chunks(size=5)
        5
        >>> find("all_reduce", "chunked_ring:segments=4").chunks(size=5)
        20
    """
    if collective not in ALGORITHMS:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(sorted(ALGORITHMS))}")
    name, *pairs = name.split(":")
    bare = Algorithm(collective, name, ALGORITHMS[collective][name])
    return bare.with_options(**bare.parse_options(pairs), **options) if pairs else bare.with_options(**options)


def algorithm_of(collective: str, algorithm: str | AlgorithmFile | Algorithm, size: int = 1) -> Algorithm:
    """Return an algorithm given as a name, file or `Algorithm`; raise ValueError unless it can serve `size` ranks."""
    if isinstance(algorithm, str):
        algorithm = find(collective, algorithm)
    elif not isinstance(algorithm, Algorithm):
        algorithm = Algorithm(collective, getattr(algorithm, "__name__", "unnamed").rpartition(".")[2], algorithm)
    if algorithm.collective != collective:
        raise ValueError(f"{algorithm.name!r} is an algorithm of {algorithm.collective}, not of {collective}")
    if reason := algorithm.unsupported(size):
        raise ValueError(reason)
    return algorithm


def serving(
    collective: str, size: int, *, rounded: bool = True, uneven: bool = True, balanced: bool = False
) -> list[str]:
    """Return the names of the algorithms that can serve a call.

    Args:
        collective: A name in `COLLECTIVES`.
        size: Number of ranks, at least 1.
        rounded: Whether the call adds or multiplies floating-point numbers.
        uneven: Whether the parts of a message may differ in length.
        balanced: Whether sums must be reduced in the balanced binary tree over the ranks.

    Example:
        >>> "recursive_doubling" in serving("all_gather", 3), "recursive_doubling" in serving("all_gather", 4)
        (False, True)
    """
    found = (find(collective, name) for name in ALGORITHMS[collective].names())
    return [each.name for each in found if each.serves(size, rounded=rounded, uneven=uneven, balanced=balanced)]
