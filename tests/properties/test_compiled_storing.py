"""How a rank stores what others read: as is faster now, which it finds out by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled_kit import COMPILED, both
from hypothesis import given
from hypothesis import strategies as st

TIMED = 1 << 12


def stored(storing: Any, nbytes: int, at: int = 0, start: int = 0) -> str:
    """Store some bytes, which must be right, and nothing beside them; which of both figures it was that changed."""
    source = np.arange(nbytes + start + 1, dtype="u1")
    target = np.full(nbytes + at + 1, 77, "u1")
    before = storing.plain_s, storing.past_s
    storing.store(target.ctypes.data + at, source.ctypes.data + start, nbytes)
    assert (target[at : at + nbytes] == source[start : start + nbytes]).all()
    assert (np.concatenate([target[:at], target[at + nbytes :]]) == 77).all()
    after = storing.plain_s, storing.past_s
    return {(False, False): "neither", (True, False): "plain", (False, True): "past"}[
        before[0] != after[0], before[1] != after[1]
    ]


def made(plain_s: float, past_s: float, count: int) -> Any:
    storing = COMPILED["Storing"]()
    storing.plain_s, storing.past_s, storing.count = plain_s, past_s, count
    return storing


@both
@given(
    nbytes=st.integers(TIMED, TIMED + 200) | st.integers(TIMED, 200_000),
    at=st.integers(0, 70),
    start=st.integers(0, 70),
    past=st.booleans(),
)
def test_it_stores_right_either_way_wherever_it_lies(nbytes: int, at: int, start: int, past: bool) -> None:
    storing = made(*((1.0, 1e-9) if past else (1.0, 1.0)), 4)
    assert stored(storing, nbytes, at, start) == ("past" if past else "plain")


@both
@pytest.mark.parametrize("nbytes", [0, 1, 15, 64, TIMED - 1])
def test_short_ones_are_not_timed(nbytes: int) -> None:
    storing = made(1.0, 1e-9, 4)
    assert stored(storing, nbytes, 3) == "neither"
    assert storing.count == 4


@both
def test_the_way_that_seems_slower_is_tried_now_and_then() -> None:
    """Often at first, when figures are of memory that nobody had touched yet."""
    tried = []
    for count in range(1, 1100):
        storing = made(1.0, 1e-9, count - 1)
        if stored(storing, TIMED) == "plain":
            tried.append(count)
    assert tried == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]


@both
@pytest.mark.parametrize(
    ("plain_s", "past_s", "way"), [(0.0, 0.0, "plain"), (3.0, 1.0, "plain"), (3.1, 1.0, "past"), (1.0, 3.0, "plain")]
)
def test_past_the_caches_only_where_plain_stores_are_by_far_slower(plain_s: float, past_s: float, way: str) -> None:
    # Readers pay for it.
    assert stored(made(plain_s, past_s, 4), TIMED) == way


@both
def test_one_that_was_interrupted_is_not_believed() -> None:
    storing = made(1e-15, 1e-15, 4)
    assert stored(storing, TIMED) == "plain"
    assert storing.plain_s == 2e-15
    # One that is faster is, and so is the first one.
    storing = made(1.0, 0.0, 4)
    assert stored(storing, TIMED) == "past"
    assert 0 < storing.past_s < 1
    storing.plain_s = 1.0
    storing.past_s = 1.0
    assert stored(storing, TIMED) == "plain"
    assert 0 < storing.plain_s < 1


@both
def test_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="two addresses"):
        COMPILED["Storing"]().store(0, 0, -1)
