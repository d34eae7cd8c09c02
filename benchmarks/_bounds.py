"""Bounds on the figures that the programs in `benchmarks/` measure, and tables of figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unisono.tools.bench import Result, Spread

__all__ = ["BoundCheck", "least_ratio", "markdown", "mean_ratio"]


@dataclass(frozen=True, slots=True)
class BoundCheck:
    """A figure compared with its bound.

    Attributes:
        what: Description of the figure.
        found: The figure with its quartiles; for a single measurement, all three are equal.
        bound: Minimum for the median, or maximum if `most`.
        most: Whether the bound is a maximum rather than a minimum.

    Example:
        >>> print(BoundCheck("2 ranks, 8 B, gloo/own", Spread(18.0, 20.0, 21.0), 15.0))
        met     2 ranks, 8 B, gloo/own: 20.00 (18.00 to 21.00), at least 15 wanted
        >>> print(BoundCheck("memory, KiB", Spread.of([108.0]), 100.0, most=True))
        MISSED  memory, KiB: 108.00, at most 100 wanted
    """

    what: str
    found: Spread
    bound: float
    most: bool = False

    @property
    def met(self) -> bool:
        """Return whether the median meets the bound."""
        return self.found.median <= self.bound if self.most else self.found.median >= self.bound

    def __str__(self) -> str:
        single = self.found.low == self.found.high
        found = f"{self.found.median:.2f}" if single else f"{self.found:.2f}"
        bound = f"at {'most' if self.most else 'least'} {self.bound:g} wanted"
        return f"{'met' if self.met else 'MISSED':<7} {self.what}: {found}, {bound}"


def mean_ratio(what: str, results: Sequence[Result], peer: str, bound: float) -> list[BoundCheck]:
    """Compare the geometric mean of a peer's ratios over some sizes with a bound; return [] if there are no results."""
    ratios = [result.against[peer].ratio for result in results]
    if not ratios:
        return []
    quartiles = zip(*((ratio.low, ratio.median, ratio.high) for ratio in ratios), strict=True)
    return [BoundCheck(f"{what}, {peer}/own, geometric mean", Spread(*map(_mean, quartiles)), bound)]


def least_ratio(what: str, results: Sequence[Result], peer: str, bound: float) -> list[BoundCheck]:
    """Compare a peer's smallest ratio over some sizes with a bound; return [] if there are no results."""
    if not results:
        return []
    least = min(results, key=lambda result: result.against[peer].ratio.median)
    return [BoundCheck(f"{what}, {peer}/own, least (at {least.nbytes} B)", least.against[peer].ratio, bound)]


def _mean(figures: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, figures)) / len(figures))


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown.

    Example:
        >>> print(markdown(("size", "ratio"), [("8 B", "1.02")]))
        | size | ratio |
        |---|---|
        | 8 B | 1.02 |
    """
    shown = [f"| {' | '.join(cells)} |" for cells in (header, *lines)]
    return "\n".join([shown[0], "|" + "---|" * len(header), *shown[1:]])
