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


@both
@given(
    count=st.sampled_from([0, 1, 3, 4, 1023, 1025, 5000]),
    rows=st.integers(2, 5),
    kind=st.sampled_from(["f4", "f8"]),
    into=st.sampled_from(["none", "own", "first", "last"]),
    shown=st.booleans(),
    past=st.booleans(),
)
def test_a_sum_goes_where_it_is_wanted(count: int, rows: int, kind: str, into: str, shown: bool, past: bool) -> None:
    """To one of its own rows as well; bit for bit in the order of rows, which stay if they are not that."""
    rng = np.random.default_rng(count + rows)
    given_ = [(rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(kind) for _ in range(rows)]
    total = given_[0]
    for row in given_[1:]:
        total = total + row
    memory = [row.copy() for row in given_]
    own, other = np.full(count + 1, 7, kind), np.full(count + 1, 7, kind)
    place = {"none": None, "own": own, "first": memory[0], "last": memory[-1]}[into]
    addresses = tuple(row.ctypes.data for row in memory)
    at = 0 if place is None else place.ctypes.data
    storing = made(1.0, 1e-9 if past else 1.0, 4)
    storing.sum(addresses, at, other.ctypes.data if shown else 0, total.nbytes, total.itemsize)
    assert other[:count].tobytes() == (total if shown else np.full(count, 7, kind)).tobytes()
    assert own[:count].tobytes() == (total if into == "own" else np.full(count, 7, kind)).tobytes()
    assert own[count] == other[count] == 7
    for number, (row, before) in enumerate(zip(memory, given_, strict=True)):
        here = into == ("first" if number == 0 else "last" if number == rows - 1 else "")
        assert row.tobytes() == (total if here else before).tobytes()


@both
@pytest.mark.parametrize(
    "given_", [((1,), 0, 0, 8, 4), ((1, 1), 0, 0, 8, 2), ((1, 1), 0, 0, 6, 4), ((1, 1), 0, 0, -8, 4)]
)
def test_what_is_no_sum_is_refused(given_: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="two rows"):
        COMPILED["Storing"]().sum(*given_)


@both
def test_an_address_is_a_number() -> None:
    with pytest.raises(TypeError):
        COMPILED["Storing"]().sum((1, "2"), 0, 0, 8, 4)
