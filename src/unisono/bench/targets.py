"""Targets: what was promised, what was found, and whether that is enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.bench.row import Row, Spread

__all__ = ["Finding", "each", "overall"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure beside its bound.

    Attributes:
        what: In words.
        found: The figure and its quartiles.
        bound: What it is held against.
        most: Whether it may be at most the bound; else it must be at least that.

    Example:
        >>> print(Finding("2 ranks, 8 B, gloo/own", Spread(18.0, 20.0, 21.0), 15.0))
        met     2 ranks, 8 B, gloo/own: 20.00 (18.00 to 21.00), at least 15 wanted
    """

    what: str
    found: Spread
    bound: float
    most: bool = False

    @property
    def met(self) -> bool:
        """Whether the median keeps the bound."""
        return self.found.median <= self.bound if self.most else self.found.median >= self.bound

    def __str__(self) -> str:
        spread = f"{self.found.median:.2f} ({self.found.low:.2f} to {self.found.high:.2f})"
        bound = f"at {'most' if self.most else 'least'} {self.bound:g} wanted"
        return f"{'met' if self.met else 'MISSED':<7} {self.what}: {spread}, {bound}"


def overall(what: str, rows: Sequence[Row], peer: str, bound: float) -> Finding:
    """The geometric mean of a peer's ratios over some sizes; its quartiles likewise."""
    ratios = [row.against[peer].ratio for row in rows]
    found = Spread(
        _mean([ratio.low for ratio in ratios]),
        _mean([ratio.median for ratio in ratios]),
        _mean([ratio.high for ratio in ratios]),
    )
    return Finding(f"{what}, {peer}/own, geometric mean", found, bound)


def each(what: str, rows: Sequence[Row], peer: str, bound: float) -> Finding:
    """A peer's ratio at the size where it is the least."""
    least = min(rows, key=lambda row: row.against[peer].ratio.median)
    return Finding(f"{what}, {peer}/own, least (at {least.nbytes} B)", least.against[peer].ratio, bound)


def _mean(figures: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, figures)) / len(figures))
