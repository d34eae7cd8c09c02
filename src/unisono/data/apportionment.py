"""Fractions of a whole, as whole numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["apportion", "equal_shares", "fractions_of"]


def equal_shares(parts: int) -> list[float]:
    """Return equal shares, which sum to 1."""
    return [1 / parts] * parts


def fractions_of(weights: Sequence[float], name: str = "weights") -> list[float]:
    """Weights divided by their sum. Raises `ValueError` if one is negative or no number, or all are zero."""
    given = [float(weight) for weight in weights]
    if not all(math.isfinite(weight) and weight >= 0 for weight in given) or not math.fsum(given) > 0:
        raise ValueError(f"{name} must be finite numbers, 0 or more, and not all 0, but are {given}")
    total = math.fsum(given)
    return [weight / total for weight in given]


def apportion(count: int, sizes: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `count`, each less than one away from its fraction.

    Hamilton's method (largest remainder): the units that rounding down leaves go to the fractions that it cut most,
    among equals to the first. Use it for the batch sizes of ranks of different speed, too.

    Args:
        count: The whole, such as a number of samples; 0 or more.
        sizes: Fractions from 0 to 1. They sum to 1, give or take 1e-9 for each.

    Raises:
        ValueError: `sizes` do not sum to 1, or one is negative or no number.

    Example:
        >>> un.data.apportion(64, [0.5, 0.25, 0.25]), un.data.apportion(10, [1 / 3] * 3)
        ([32, 16, 16], [4, 3, 3])
    """
    fractions = [float(size) for size in sizes]
    if not all(math.isfinite(fraction) and fraction >= 0 for fraction in fractions):
        raise ValueError(f"sizes must be fractions from 0 to 1, but are {fractions}")
    total = math.fsum(fractions)
    if not fractions or abs(total - 1) > 1e-9 * len(fractions):
        raise ValueError(f"sizes must sum to 1, but {fractions} sum to {total:.12g}; divide each of them by the sum")
    # Integers from here on, so that equal fractions are cut off equally. 0.7 means seven tenths.
    weights = [round(fraction * 10**15) for fraction in fractions]
    total_weight = sum(weights)
    quotas = [divmod(count * weight, total_weight) for weight in weights]
    lengths = [length for length, _ in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda part: quotas[part][1], reverse=True)
    for part in by_remainder[: count - sum(lengths)]:
        lengths[part] += 1
    return lengths
