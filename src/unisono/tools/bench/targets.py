"""Targets: a figure beside its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.tools.bench.result import Result
from unisono.tools.bench.timings import Spread

__all__ = ["Finding", "least_ratio", "mean_ratio"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure beside its bound.

    Attributes:
        what: Description of the figure.
        found: The figure and its quartiles; a single figure has none.
        bound: Minimum of the median.
        most: Whether the bound is the maximum instead.

    Example:
        >>> print(Finding("2 ranks, 8 B, gloo/own", Spread(18.0, 20.0, 21.0), 15.0))
        met     2 ranks, 8 B, gloo/own: 20.00 (18.00 to 21.00), at least 15 wanted
        >>> print(Finding("memory, KiB", Spread.of([108.0]), 100.0, most=True))
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


def mean_ratio(what: str, results: Sequence[Result], peer: str, bound: float) -> list[Finding]:
    """Compare the geometric mean of a peer's ratios over some sizes with a bound; no finding without a size."""
    ratios = [result.against[peer].ratio for result in results]
    if not ratios:
        return []
    quartiles = zip(*((ratio.low, ratio.median, ratio.high) for ratio in ratios), strict=True)
    return [Finding(f"{what}, {peer}/own, geometric mean", Spread(*map(_mean, quartiles)), bound)]


def least_ratio(what: str, results: Sequence[Result], peer: str, bound: float) -> list[Finding]:
    """Compare a peer's smallest ratio over some sizes with a bound; no finding without a size."""
    if not results:
        return []
    least = min(results, key=lambda result: result.against[peer].ratio.median)
    return [Finding(f"{what}, {peer}/own, least (at {least.nbytes} B)", least.against[peer].ratio, bound)]


def _mean(figures: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, figures)) / len(figures))
