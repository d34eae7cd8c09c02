"""There is an extension where one can be compiled, and a page in it sums what ranks give."""

from __future__ import annotations

import mmap
import os
import shutil
import sysconfig
from pathlib import Path

import pytest
from compiled_kit import COMPILED, PLAIN, both
from hypothesis import given
from hypothesis import strategies as st

from unisono.compiled import NO_EXTENSIONS


def test_the_extension_is_there_where_there_is_a_compiler() -> None:
    compiler = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    header = Path(sysconfig.get_path("include")) / "Python.h"
    possible = compiler and header.exists() and not sysconfig.get_config_var("Py_GIL_DISABLED")
    wanted = bool(possible) and not os.environ.get(NO_EXTENSIONS)
    assert {name for name, found in COMPILED.items() if found is not None} >= (set(COMPILED) if wanted else set())
    assert set(PLAIN) == set(COMPILED) - {
        *("Hook", "Meeting", "Page", "Running", "Stages", "Storing", "Window", "stop_sums", "sum_ahead", "sum_rows"),
    }


@both
@given(data=st.data(), ranks=st.integers(1, 5), rounds=st.integers(1, 6))
def test_a_page_sums_what_all_ranks_give(data: st.DataObject, ranks: int, rounds: int) -> None:
    """Ranks come and look in any order, and nobody sees a sum before all have come to it."""
    memory = mmap.mmap(-1, 4096)
    words = [bytearray(24) for _ in range(ranks)]
    pages = [COMPILED["Page"](memory, words[rank], rank, ranks, 1) for rank in range(ranks)]
    given_words = [[data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3)) for _ in range(rounds)]]
    given_words += [[[(w * (rank + 3)) % 2**64 for w in one] for one in given_words[0]] for rank in range(1, ranks)]
    at, waiting = [0] * ranks, [False] * ranks
    while min(at) < rounds:
        rank = data.draw(st.sampled_from([r for r in range(ranks) if at[r] < rounds]))
        view = memoryview(words[rank]).cast("Q")
        if not waiting[rank]:
            view[0], view[1], view[2] = given_words[rank][at[rank]]
            pages[rank].start()
            waiting[rank] = True
        all_there = all(at[other] + waiting[other] > at[rank] for other in range(ranks))
        before = list(view)
        assert pages[rank].test() is all_there
        if all_there:
            sums = [sum(one[at[rank]][n] for one in given_words) % 2**64 for n in range(3)]
            assert (list(view), pages[rank].number) == (sums, at[rank] + 1)
            at[rank], waiting[rank] = at[rank] + 1, False
        else:
            assert list(view) == before


@both
@pytest.mark.parametrize("given_page", [(4096, 8, 0, 2), (128, 24, 0, 2), (4096, 24, 2, 2), (4096, 24, -1, 2)])
def test_a_page_that_cannot_be(given_page: tuple[int, int, int, int]) -> None:
    nbytes, words, rank, size = given_page
    with pytest.raises(ValueError, match="128 bytes"):
        COMPILED["Page"](memoryview(mmap.mmap(-1, 4096))[:nbytes], bytearray(words), rank, size, 1)


@both
def test_a_page_is_not_used_after_a_sum_that_was_given_up() -> None:
    memory = mmap.mmap(-1, 4096)
    pages = [COMPILED["Page"](memory, bytearray(24), rank, 2, 1) for rank in range(2)]
    pages[0].start()
    assert pages[0].test() is False
    with pytest.raises(RuntimeError, match="ended the wait"):
        pages[0].start()
    pages[1].start()
    assert (pages[1].test(), pages[0].test()) == (True, True)
    pages[0].start()
    assert [page.number for page in pages] == [2, 1]


@both
def test_a_page_without_memory_says_so() -> None:
    page = COMPILED["Page"].__new__(COMPILED["Page"])
    for action in (page.start, page.test):
        with pytest.raises(RuntimeError, match="without memory"):
            action()
