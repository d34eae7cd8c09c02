"""Ranks that add up what they lay into memory that they share: here they are threads of one process."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np
import pytest
from compiled_kit import COMPILED, both
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting_kit import meetings
from patience import together


def stages(size: int, looks: int, stage_bytes: int, *, past: bool) -> tuple[list[Any], list[Any]]:
    nbytes, made = 2 * size * stage_bytes, []
    met, pages, memory = meetings(size, looks, nbytes)
    for rank in range(size):
        storing = COMPILED["Storing"]()
        storing.plain_s, storing.past_s, storing.count = (1.0, 1e-9, 2) if past else (1e-9, 1e-9, 2)
        made.append(COMPILED["Stages"](memory[rank], met[rank], storing))
    return made, pages


def told(part: np.ndarray[Any, Any], root: int) -> bytes:
    return struct.pack("=4q", part.ctypes.data, part.nbytes, part.itemsize, root)


@both
@settings(max_examples=3 * settings.default.max_examples)
@given(
    size=st.integers(2, 4),
    looks=st.sampled_from([0, 1, 1000]),
    stage_bytes=st.sampled_from([64, 1024, 16384]),
    calls=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 7, 16, 33, 130, 2049, 4099]), st.sampled_from(["f4", "f8"]), st.integers(-1, 3)
        ),
        max_size=8,
    ),
    at=st.integers(0, 3),
    past=st.booleans(),
)
def test_the_sum_in_the_order_of_ranks(
    size: int, looks: int, stage_bytes: int, calls: list[tuple[int, str, int]], at: int, past: bool
) -> None:
    """Bit for bit; who does not get it keeps its part; and what lies beside it stays."""
    made, pages = stages(size, looks, stage_bytes, past=past)
    plans: list[list[bytes]] = [[] for _ in range(size)]
    parts, wanted, meets = [], [], 0
    for number, (longest, kind, to) in enumerate(calls):
        count = min(longest, 3 * stage_bytes // int(kind[1]) + 1)
        root = to if to < size else -1
        rng = np.random.default_rng([number, count])
        # Such that another order of additions would show; of two NaNs, the first one's bits stay.
        given_ = [(rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(kind) for _ in range(size)]
        if count > 1:
            for rank, part in enumerate(given_):
                part.view(kind.replace("f", "u"))[count // 2] = (
                    np.array(np.nan, kind).view(kind.replace("f", "u")) + rank
                )
        total = given_[0]
        for part in given_[1:]:
            total = total + part
        for rank in range(size):
            memory = np.full(count + at + 1, 55, kind)
            memory[at : at + count] = given_[rank]
            parts.append((memory, memory[at : at + count]))
            plans[rank].append(told(parts[-1][1], root))
            wanted.append(total if root in (-1, rank) else given_[rank])
        meets += -(-count * int(kind[1]) // stage_bytes) * (1 if size == 2 and root >= 0 else 2)
    outcomes = together(*(lambda rank=rank: [made[rank].add(plan) for plan in plans[rank]] for rank in range(size)))
    assert outcomes == [[None] * len(calls)] * size
    assert [page.number for page in pages] == [meets] * size
    for (memory, found), value in zip(parts, wanted, strict=True):
        assert found.tobytes() == value.tobytes()
        beside = np.concatenate([memory[:at], memory[at + found.size :]])
        assert (beside == 55).all()


@both
def test_memory_of_other_sizes_and_behind_the_stages_stays() -> None:
    """Stages are as long as the memory allows, in lines of 64 bytes; what is left is not touched."""
    size, nbytes = 3, 2 * 3 * 64 + 63
    met, _, memory = meetings(size, 1000, nbytes)
    memory[0][:] = b"\1" * nbytes
    made = [COMPILED["Stages"](memory[rank], met[rank], COMPILED["Storing"]()) for rank in range(size)]
    parts = [np.arange(100, dtype="f4") for _ in range(size)]
    together(*(lambda rank=rank: made[rank].add(told(parts[rank], -1)) for rank in range(size)))
    for part in parts:
        assert (part == 3 * np.arange(100)).all()
    assert bytes(memory[0][2 * 3 * 64 :]) == b"\1" * 63


@both
@pytest.mark.parametrize(("size", "start", "nbytes"), [(1, 0, 4096), (2, 0, 255), (2, 8, 256)])
def test_stages_that_cannot_be(size: int, start: int, nbytes: int) -> None:
    met, _, memory = meetings(size, 1)
    with pytest.raises(ValueError, match="128 bytes for each"):
        COMPILED["Stages"](memory[0][start : start + nbytes], met[0], COMPILED["Storing"]())


@both
@pytest.mark.parametrize(
    "given_",
    [None, "text", bytes(31), *(struct.pack("=4q", *bad) for bad in [(0, 8, 2, 0), (0, 6, 4, 0), (0, -8, 4, 0)])]
    + [struct.pack("=4q", 0, 8, 4, root) for root in (-2, 2)],
)
def test_what_is_no_sum_is_refused(given_: object) -> None:
    made, pages = stages(2, 1, 64, past=False)
    with pytest.raises(ValueError, match="add\\(\\) takes"):
        made[0].add(given_)
    assert pages[0].number == 0


class _Interrupted:
    def see_through(self, _said: object, _deadline: float) -> bool:
        raise KeyboardInterrupt


class _Other:
    def see_through(self, _said: object, _deadline: float) -> bool:
        return False


def alone(agreement: object) -> tuple[Any, Any]:
    """One of two ranks, whose other never comes."""
    memory = mmap.mmap(-1, 8192)
    page = COMPILED["Page"](memory, bytearray(24), 0, 2, 1)
    meeting = COMPILED["Meeting"](page, agreement, COMPILED["Guarded"](), (bytes(24), bytes(24)))
    return page, COMPILED["Stages"](memoryview(memory)[4096:], meeting, COMPILED["Storing"]())


@both
def test_after_a_wait_that_an_error_ended_nothing_is_summed() -> None:
    page, made = alone(_Interrupted())
    part = np.ones(10, "f4")
    with pytest.raises(KeyboardInterrupt):
        made.add(told(part, -1))
    with pytest.raises(RuntimeError, match="ended the wait"):
        made.add(told(part, -1))
    assert page.number == 1
    assert (part == 1).all()


@both
def test_another_sum_than_that_of_a_meeting_is_an_error() -> None:
    _, made = alone(_Other())
    with pytest.raises(RuntimeError, match="in the middle"):
        made.add(told(np.ones(10, "f4"), -1))


@both
@pytest.mark.parametrize("said", [(bytes(23), bytes(24)), (bytes(24), bytes(25))])
def test_a_meeting_that_cannot_be(said: tuple[bytes, bytes]) -> None:
    page = COMPILED["Page"](mmap.mmap(-1, 4096), bytearray(24), 0, 2, 1)
    with pytest.raises(ValueError, match="three words"):
        COMPILED["Meeting"](page, None, COMPILED["Guarded"](), said)
    with pytest.raises(RuntimeError, match="without memory"):
        COMPILED["Meeting"](
            COMPILED["Page"].__new__(COMPILED["Page"]), None, COMPILED["Guarded"](), (bytes(24), bytes(24))
        )
