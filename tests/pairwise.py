"""Parametrization over products, of which `make test` takes few cases, and `make soak` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations, product
from typing import Any

import pytest

__all__ = ["pairwise", "short"]


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations of some values; those that show no new pair of values are for the soak.

    A fault that depends on one value, or on two of different arguments together, shows in the rest, too.
    """
    values = [list(axis) for axis in axes.values()]
    places = list(product(*(range(len(axis)) for axis in values)))
    covered = {place: set(combinations(enumerate(place), min(2, len(place)))) for place in places}
    left = set().union(*covered.values())
    short = set()
    while left:
        best = max(places, key=lambda place: len(covered[place] & left))
        short.add(best)
        left -= covered[best]
    cases = [
        pytest.param(
            *(axis[index] for axis, index in zip(values, place, strict=True)),
            marks=() if place in short else pytest.mark.soak,
            id="-".join(_name(axis[index], index) for axis, index in zip(values, place, strict=True)),
        )
        for place in places
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def short(names: str, cases: Iterable[Any], chosen: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over cases; those that are not chosen are for the soak."""
    listed = list(cases)
    assert set(chosen) <= set(listed)
    return pytest.mark.parametrize(
        names, [pytest.param(*case, marks=() if case in chosen else pytest.mark.soak) for case in listed]
    )


def _name(value: Any, index: int) -> str:
    return str(value) if isinstance(value, str | int | float) or value is None else f"{index}"
