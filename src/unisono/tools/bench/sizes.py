"""Parsing and formatting of message sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.tools.bench.result import Result
from unisono.tools.bench.timings import Spread

__all__ = ["BoundCheck", "least_ratio", "mean_ratio", "parse_sizes", "shown_size"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes in bytes from a list such as "8,4K,1M", or a range such as "8:128M:*4" or "1M:4M:+1M".

    Raises:
        ValueError: The text is neither; the message shows the syntax.

    Example:
        >>> parse_sizes("8,4K,1M")
        (8, 4096, 1048576)
        >>> parse_sizes("8:2K:*4")
        (8, 32, 128, 512, 2048)
    """
    if ":" not in text:
        return tuple(_bytes(part) for part in text.split(","))
    parts = text.split(":")
    if len(parts) != 3 or parts[2][:1] not in ("*", "+"):
        raise ValueError(
            f"{text!r} is not a range of sizes; pass first:last:*factor or first:last:+step, as in 8:128M:*4"
        )
    size = _bytes(parts[0])
    last = _bytes(parts[1])
    step = _bytes(parts[2][1:])
    multiplies = parts[2][0] == "*"
    if multiplies and step < 2:
        raise ValueError(f"{text!r} never ends; the factor must be at least 2")
    sizes = []
    while size <= last:
        sizes.append(size)
        size = size * step if multiplies else size + step
    if not sizes:
        raise ValueError(f"{text!r} is empty; the first size must not be larger than the last")
    return tuple(sizes)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)(?:iB|B)?", text.strip(), re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if size < 1:
        raise ValueError(
            f"{text!r} is not a size; pass a positive number of bytes, with K, M or G for 1024, 1024², 1024³"
        )
    return size


def shown_size(nbytes: int) -> str:
    """Format a size in its natural unit.

    Example:
        >>> shown_size(4096), shown_size(100 << 20), shown_size(1000)
        ('4 KiB', '100 MiB', '1000 B')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


@dataclass(frozen=True, slots=True)
class BoundCheck:
    """A figure beside its bound.

    Attributes:
        what: Description of the figure.
        found: The figure and its quartiles; a single figure has none.
        bound: Minimum of the median.
        most: Whether the bound is the maximum instead.

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
    """Compare the geometric mean of a peer's ratios over some sizes with a bound; no finding without a size."""
    ratios = [result.against[peer].ratio for result in results]
    if not ratios:
        return []
    quartiles = zip(*((ratio.low, ratio.median, ratio.high) for ratio in ratios), strict=True)
    return [BoundCheck(f"{what}, {peer}/own, geometric mean", Spread(*map(_mean, quartiles)), bound)]


def least_ratio(what: str, results: Sequence[Result], peer: str, bound: float) -> list[BoundCheck]:
    """Compare a peer's smallest ratio over some sizes with a bound; no finding without a size."""
    if not results:
        return []
    least = min(results, key=lambda result: result.against[peer].ratio.median)
    return [BoundCheck(f"{what}, {peer}/own, least (at {least.nbytes} B)", least.against[peer].ratio, bound)]


def _mean(figures: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, figures)) / len(figures))
