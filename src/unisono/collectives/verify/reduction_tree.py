"""Reduction trees: which contributions were added to which, in what order."""

from __future__ import annotations

__all__ = ["ReductionTrees"]


class ReductionTrees:
    """Trees by number. Equal trees have equal numbers, and give equal bits.

    The order of operands counts, because the sum of two NaNs has the bits of the first.

    Example:
        >>> trees = ReductionTrees()
        >>> trees.plus(trees.leaf(1), trees.leaf(0)) == trees.plus(trees.leaf(0), trees.leaf(1))
        False
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._nodes: list[tuple[int, int]] = []

    def leaf(self, contribution: int) -> int:
        """Return the number of the tree of a single contribution."""
        return self._number((-1, contribution))

    def plus(self, some: int, other: int) -> int:
        """Return the number of the sum of two trees, in this order."""
        return self._number((some, other))

    def _number(self, node: tuple[int, int]) -> int:
        number = self._numbers.setdefault(node, len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(node)
        return number

    def text(self, number: int) -> str:
        """Return a tree in words, such as "((0+1)+2)"."""
        low, high = self._nodes[number]
        return str(high) if low < 0 else f"({self.text(low)}+{self.text(high)})"
