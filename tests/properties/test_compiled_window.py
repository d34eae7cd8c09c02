"""Ranks that read each other's memory: here they are threads of one process, which may read its own."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from typing import Any

import pytest
from compiled_kit import COMPILED, both
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting_kit import meetings
from patience import together

from unisono.transports._mpi_window import _COPY, _SHOW, _TAKE, _packed


def windows(size: int, looks: int, pids: list[int] | None = None) -> tuple[list[Any], list[Any]]:
    met, pages, memory = meetings(size, looks)
    told = struct.pack(f"={size}i", *(pids or [os.getpid()] * size))
    return [COMPILED["Window"](memory[rank], told, met[rank]) for rank in range(size)], pages


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
@pytest.mark.parametrize(("start", "nbytes", "pids"), [(0, 31, 8), (0, 32, 7), (4, 32, 8)])
def test_a_window_that_cannot_be(start: int, nbytes: int, pids: int) -> None:
    met, _, memory = meetings(2, 1)
    with pytest.raises(ValueError, match="8 bytes for each pair"):
        COMPILED["Window"](memory[0][start : start + nbytes], bytes(pids), met[0])


@both
@pytest.mark.parametrize("given_", [bytes(39), "text", None])
def test_what_is_no_plan_is_refused(given_: object) -> None:
    made, pages = windows(1, 1)
    with pytest.raises(TypeError, match="pieces"):
        made[0].move(given_)
    assert pages[0].number == 0
