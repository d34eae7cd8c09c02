"""Gossip topologies: the neighbours of each rank, and mixing weights that preserve the mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt

__all__ = ["TOPOLOGIES", "Neighbours", "Topology", "complete", "exponential", "grid", "mixing", "ring", "topology"]

Neighbours = Sequence[Sequence[int]]
"""For each rank, the other ranks that it receives from."""

Topology = Callable[[int, int], Neighbours]
"""Function that takes the number of ranks and the number of the round (from 0), and returns the neighbours."""

_TOLERANCE = 1e-12


def ring(size: int, round: int = 0) -> list[list[int]]:
    """Ring topology: the neighbours of each rank are the two adjacent ranks.

    Example:
        >>> ring(4), ring(2), ring(1)
        ([[1, 3], [0, 2], [1, 3], [0, 2]], [[1], [0]], [[]])
    """
    return [sorted({(rank - 1) % size, (rank + 1) % size} - {rank}) for rank in range(size)]


def exponential(size: int, round: int = 0) -> list[list[int]]:
    """Exponential topology: in round k, each rank r receives from rank r - 2^k, modulo the number of ranks.

    The distances 1, 2, 4, ... begin again before they reach the number of ranks. If the number of ranks is a power of
    two, one cycle through the distances gives every rank the exact mean (Assran, Loizou, Ballas, Rabbat: Stochastic
    gradient push, 2019).

    Example:
        >>> exponential(4, 0), exponential(4, 1), exponential(4, 2)
        ([[3], [0], [1], [2]], [[2], [3], [0], [1]], [[3], [0], [1], [2]])
    """
    if size == 1:
        return [[]]
    distance = 1 << round % (size - 1).bit_length()
    return [[(rank - distance) % size] for rank in range(size)]


def complete(size: int, round: int = 0) -> list[list[int]]:
    """All-to-all topology: every rank is a neighbour of every other rank.

    Example:
        >>> complete(3)
        [[1, 2], [0, 2], [0, 1]]
    """
    return [[other for other in range(size) if other != rank] for rank in range(size)]


def grid(size: int, round: int = 0) -> list[list[int]]:
    """Grid topology, as close to a square as the number of ranks allows; a line if the number is prime.

    Example:
        >>> grid(6)
        [[1, 3], [0, 2, 4], [1, 5], [0, 4], [1, 3, 5], [2, 4]]
    """
    rows = next(r for r in range(isqrt(size), 0, -1) if size % r == 0)
    columns = size // rows
    places = [divmod(rank, columns) for rank in range(size)]
    return [
        [other for other, (y, x) in enumerate(places) if abs(y - row) + abs(x - column) == 1] for row, column in places
    ]


TOPOLOGIES: dict[str, Topology] = {"complete": complete, "exponential": exponential, "grid": grid, "ring": ring}
"""The topologies by name."""


def topology(given: str | Neighbours | Topology, size: int) -> Topology:
    """Return the topology for a name, a function, or one list of neighbours for each rank.

    Raises:
        ValueError: The name is unknown; or the lists do not connect all ranks, or have no valid weights (see `mixing`).
    """
    if isinstance(given, str):
        if given not in TOPOLOGIES:
            raise ValueError(f"unknown topology {given!r}; known: {', '.join(sorted(TOPOLOGIES))}")
        return TOPOLOGIES[given]
    if callable(given):
        return given
    lists = [list(neighbours) for neighbours in given]
    mixing(lists, size)
    unreached = set(range(size)) - _reached(lists)
    if unreached:
        raise ValueError(
            f"rank {min(unreached)} receives nothing from rank 0, directly or through others, so "
            "ranks would never agree; connect them"
        )
    return lambda *_: lists


def mixing(neighbours: Neighbours, size: int) -> list[dict[int, float]]:
    """Return the weights with which each rank mixes its own and its neighbours' values: a doubly stochastic matrix.

    If all neighbours receive from each other, the weights are Metropolis-Hastings weights: a link has weight 1 / (1 +
    n), where n is the larger neighbour count of its two ranks. If some links are one-way, each rank must send to as
    many ranks as it receives from, and all links have weight 1 / (1 + the largest number of neighbours). A rank's
    weight for its own value is the remainder to 1.

    Raises:
        ValueError: The number of lists differs from the number of ranks; a list contains an invalid rank, its own rank
            or a rank twice; or the weights would not preserve the mean.

    Example:
        >>> mixing([[1], [0, 2], [1]], 3)[0]
        {0: 0.6666666666666667, 1: 0.3333333333333333}
        >>> mixing([[1], [2], [0]], 3)
        [{0: 0.5, 1: 0.5}, {1: 0.5, 2: 0.5}, {0: 0.5, 2: 0.5}]
    """
    _check(neighbours, size)
    degrees = [len(taken) for taken in neighbours]
    mutual = all(rank in neighbours[other] for rank, taken in enumerate(neighbours) for other in taken)
    rows = []
    for rank, taken in enumerate(neighbours):
        row = {other: 1 / (1 + (max(degrees[rank], degrees[other]) if mutual else max(degrees))) for other in taken}
        row[rank] = 1 - sum(row.values())
        rows.append(dict(sorted(row.items())))
    columns = [0.0] * size
    for row in rows:
        for rank, weight in row.items():
            columns[rank] += weight
    for rank, column in enumerate(columns):
        if abs(column - 1) > _TOLERANCE * size:
            gives = sum(rank in taken for taken in neighbours)
            raise ValueError(
                f"rank {rank} receives from {degrees[rank]} ranks and sends to {gives}: mixing would not keep the "
                "mean. Make neighbours mutual, or let each rank send to as many ranks as it receives from"
            )
    return rows


def _check(neighbours: Neighbours, size: int) -> None:
    if len(neighbours) != size:
        raise ValueError(f"neighbours must have a list for each of the {size} ranks, not {len(neighbours)}")
    for rank, taken in enumerate(neighbours):
        if len(set(taken)) != len(taken) or not all(0 <= other < size and other != rank for other in taken):
            raise ValueError(
                f"neighbours of rank {rank} must be distinct, other ranks of 0 to {size - 1}, not {list(taken)}"
            )


def _reached(neighbours: Neighbours) -> set[int]:
    """Return the ranks that rank 0 reaches. They also reach rank 0, because in- and out-degrees are equal."""
    reached: set[int] = {0}
    while True:
        more = {rank for rank, taken in enumerate(neighbours) if reached & set(taken)} - reached
        if not more:
            return reached
        reached |= more
