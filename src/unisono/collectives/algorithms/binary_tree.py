"""In-order binary tree with any number of places, on which double binary trees are based.

All left subtrees are complete, so all odd-numbered places are leaves. Source: Sanders, Speck and Träff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009, section 2.
"""

from __future__ import annotations

from unisono.collectives.algorithms.fold import nodes_of

__all__ = ["children", "path"]


def path(place: int, size: int) -> list[int]:
    """Return the path from the root to a place. Places are numbered from 1 to `size`.

    Example:
        >>> path(3, 6), path(5, 6)
        ([4, 2, 3], [4, 6, 5])
    """
    found: list[int] = []
    before = 0
    while not found or found[-1] != place:
        top = nodes_of(size)
        found.append(before + top)
        before, size = (before, top - 1) if place < found[-1] else (before + top, size - top)
    return found


def children(place: int, size: int) -> list[int]:
    """Return a place's children: the roots of its left subtree, which is complete, and of its right subtree.

    Example:
        >>> children(4, 6), children(6, 6), children(5, 6)
        ([2, 6], [5], [])
    """
    low = place & -place
    rest = min(low - 1, size - place)
    left = [place - low // 2] if low > 1 else []
    return [*left, place + nodes_of(rest)] if rest else left
