"""Ranks that read each other's memory: here they are threads of one process, which may read its own."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
import sys
import time
from typing import Any

import pytest
from compiled_kit import COMPILED, both
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import together

from unisono.transports._mpi_window import _COPY, _SHOW, _TAKE, _packed

SAID = 7


class Waiting:
    """An agreement of ranks that only wait."""

    def __init__(self, page: Any, words: bytearray) -> None:
        self._page, self._words = page, words

    def see_through(self, said: tuple[bytes, bytes], _deadline: float) -> bool:
        ends = time.monotonic() + 20.0
        while not self._page.test():
            if time.monotonic() > ends:
                raise TimeoutError("nobody comes")
        return bytes(self._words) == said[1]


def windows(size: int, looks: int, pids: list[int] | None = None) -> tuple[list[Any], list[Any]]:
    memory, pages, made = mmap.mmap(-1, 4096), [], []
    told = struct.pack(f"={size}i", *(pids or [os.getpid()] * size))
    said = struct.pack("=3Q", SAID, 0, 0), struct.pack("=3Q", SAID * size, 0, 0)
    for rank in range(size):
        words = bytearray(24)
        page = COMPILED["Page"](memory, words, rank, size, looks)
        shown = memoryview(memory)[128 * size :]
        pages.append(page)
        made.append(COMPILED["Window"](shown, told, page, Waiting(page, words), COMPILED["Guarded"](), said))
    return made, pages


@both
@settings(max_examples=3 * settings.default.max_examples)
@given(
    size=st.integers(1, 4),
    looks=st.sampled_from([0, 1, 1000]),
    rounds=st.lists(st.lists(st.sampled_from([None, 0, 1, 100, 65535, 70000]), min_size=16, max_size=16), max_size=4),
)
def test_what_is_shown_is_taken_and_nothing_else(size: int, looks: int, rounds: list[list[int | None]]) -> None:
    """Each pair of ranks gives any number of bytes, or nothing; a rank to itself, too."""
    made, pages = windows(size, looks)
    wanted, found = [], []
    plans: list[list[bytes]] = []
    for number, lengths in enumerate(rounds):
        pieces: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(size)]
        for pair, nbytes in enumerate(lengths[: size * size]):
            giver, taker = divmod(pair, size)
            if nbytes is None:
                continue
            given_ = bytes((number + 3 * pair + n) % 251 for n in range(256)) * (nbytes // 256 + 1)
            source = ctypes.create_string_buffer(given_, len(given_))
            target = ctypes.create_string_buffer(nbytes + 1)
            wanted.append((given_[:nbytes] + b"\0", source))
            found.append(target)
            here, there = ctypes.addressof(source), ctypes.addressof(target)
            if giver == taker:
                pieces[giver].append((_COPY, giver, there, nbytes, here))
            else:
                pieces[giver].append((_SHOW, taker, here, nbytes, 0))
                pieces[taker].append((_TAKE, giver, there, nbytes, 0))
        plans.append([_packed(mine)[0] for mine in pieces])
    outcomes = together(*(lambda rank=rank: [made[rank].move(plan[rank]) for plan in plans] for rank in range(size)))
    assert outcomes == [[None] * len(rounds)] * size
    assert [target.raw for target in found] == [given_ for given_, _ in wanted]
    assert [page.number for page in pages] == [2 * len(rounds)] * size


@both
def test_who_cannot_be_read_is_told_and_the_others_are_not_kept() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    made, _ = windows(2, 1, [os.getpid(), ended.pid])
    target = ctypes.create_string_buffer(8)
    reading = _packed([(_TAKE, 1, ctypes.addressof(target), 8, 0)])[0]
    error, other = together(lambda: made[0].move(reading), lambda: made[1].move(b""))
    assert isinstance(error, ProcessLookupError)
    assert other is None
    assert made[1].reads(0, ctypes.addressof(target), bytearray(8)) is True
    assert made[0].reads(1, ctypes.addressof(target), bytearray(8)) is False
    assert made[0].reads(2, ctypes.addressof(target), bytearray(8)) is False
    assert made[0].reads(0, 8, bytearray(8)) is False


@both
def test_after_a_wait_that_an_error_ended_nothing_is_read() -> None:
    class Interrupted:
        def see_through(self, _said: object, _deadline: float) -> bool:
            raise KeyboardInterrupt

    memory, words = mmap.mmap(-1, 4096), bytearray(24)
    page = COMPILED["Page"](memory, words, 0, 2, 1)
    said = bytes(24), bytes(24)
    window = COMPILED["Window"](memoryview(memory)[256:], bytes(8), page, Interrupted(), COMPILED["Guarded"](), said)
    with pytest.raises(KeyboardInterrupt):
        window.move(b"")
    with pytest.raises(RuntimeError, match="ended the wait"):
        window.move(b"")
    assert page.number == 1


@both
def test_another_sum_than_that_of_this_call_is_an_error() -> None:
    memory, words = mmap.mmap(-1, 4096), bytearray(24)
    page = COMPILED["Page"](memory, words, 0, 1, 1)
    said = struct.pack("=3Q", 1, 0, 0), struct.pack("=3Q", 2, 0, 0)
    agreement = Waiting(page, words)
    window = COMPILED["Window"](memoryview(memory)[128:], bytes(4), page, agreement, COMPILED["Guarded"](), said)
    with pytest.raises(RuntimeError, match="in the middle"):
        window.move(b"")


@both
@pytest.mark.parametrize(("nbytes", "pids", "said"), [(31, 8, 24), (32, 7, 24), (32, 8, 23)])
def test_a_window_that_cannot_be(nbytes: int, pids: int, said: int) -> None:
    memory = mmap.mmap(-1, 4096)
    page = COMPILED["Page"](memory, bytearray(24), 0, 2, 1)
    told = bytes(said), bytes(24)
    with pytest.raises(ValueError, match="8 bytes for each pair"):
        COMPILED["Window"](memoryview(memory)[256 : 256 + nbytes], bytes(pids), page, None, COMPILED["Guarded"](), told)


@both
@pytest.mark.parametrize("given_", [bytes(39), "text", None])
def test_what_is_no_plan_is_refused(given_: object) -> None:
    made, pages = windows(1, 1)
    with pytest.raises(TypeError, match="pieces"):
        made[0].move(given_)
    with pytest.raises(TypeError, match="pieces"):
        COMPILED["Window"].__new__(COMPILED["Window"]).move(b"")
    assert pages[0].number == 0
