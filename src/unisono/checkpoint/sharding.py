"""Sharding of writes: every rank gets an equal share of the bytes, in slices of tensors where needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Share", "shares"]

_UNSPLIT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes `start` to `stop` of a tensor."""

    name: str
    start: int
    stop: int


def shares(tensors: Sequence[tuple[str, int, int]], ranks: int) -> list[list[Share]]:
    """For each rank, the slices that it writes: disjoint, covering, and equal in bytes up to 4 KiB.

    Tensors are concatenated, and the sequence is cut into equal parts. Tensors of up to 4 KiB are not split, nor are
    elements. Wide elements come first, so that each slice is aligned in an aligned file.

    Args:
        tensors: Name, bytes, and bytes of one element, of each.
        ranks: Number of shares.

    Example:
        >>> shares([("a", 8000, 4), ("b", 16, 8)], 2)
        [[Share(name='b', start=0, stop=16), Share(name='a', start=0, stop=3992)], [Share(name='a', start=3992, ...)]]
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor[2])
    total = sum(nbytes for _, nbytes, _ in ordered)
    given: list[list[Share]] = [[] for _ in range(ranks)]
    rank = position = 0
    for name, nbytes, item in ordered:
        start = 0
        while rank < ranks - 1 and position + nbytes > (border := (rank + 1) * total // ranks):
            inside = border - position
            cut = inside // item * item if nbytes > _UNSPLIT_BYTES else (nbytes if 2 * inside > nbytes else 0)
            if cut > start:
                given[rank].append(Share(name, start, cut))
                start = cut
            rank += 1
        if start < nbytes or not nbytes:
            given[rank].append(Share(name, start, nbytes))
        position += nbytes
    return given
