"""Rows of which ranks tell how much is ready: all of it is summed once, by whoever and whenever, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from compiled_kit import COMPILED, both
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.transports import _shm_ahead
from unisono.transports._shm_ahead import Ahead, ledger_bytes

STRIDE = 4096
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["tell"] * 6 + ["enter"] * 2 + ["withdraw"]),
        st.integers(0, 4),
        st.one_of(st.integers(0, 900), st.sampled_from([1, 15, 16, 47, 48])),
    ),
    max_size=30,
)


class Ranks:
    """All ranks of one reduction after another, in one process."""

    def __init__(self, size: int, dtype: torch.dtype, count: int) -> None:
        self.memory = torch.zeros(size * STRIDE + ledger_bytes(size), dtype=torch.uint8)
        self.memory[: size * STRIDE] = 1
        self.number = 1
        self.rows = [self.memory[r * STRIDE :][: count * dtype.itemsize].view(dtype) for r in range(size)]
        self.each = [Ahead(self.memory, STRIDE, r, size, lambda: self.number) for r in range(size)]

    def beside(self) -> int:
        """The only number behind rows, if nobody has written there."""
        (found,) = self.memory[: -ledger_bytes(len(self.rows))].view(-1, STRIDE)[:, self.rows[0].nbytes :].unique()
        return int(found)

    def tell(self, rank: int, nbytes: int) -> bool:
        """As the holder of `told` does; whether it was asked."""
        word, tag = self.each[rank].told
        if tag[0]:
            word[0] = tag[0] + nbytes
        return tag[0] != 0


class Reduction:
    """Rows fill, some ranks come early and sum, and then all finish; `check` tells what rows should hold."""

    def __init__(self, ranks: Ranks, fresh: list[torch.Tensor], divisor: int, piece: int) -> None:
        self.ranks, self.fresh, self.divisor, self.piece = ranks, fresh, divisor, piece
        self.size, self.count, self.width = len(fresh), fresh[0].numel(), fresh[0].element_size()
        total = fresh[0].clone()
        for row in fresh[1:]:
            total += row
        self.mean = total / divisor
        self.ready, self.done = [0] * self.size, 0
        self.helping: dict[int, Callable[[], bool]] = {}
        self.withdrawn: set[int] = set()
        for row, numbers, each in zip(ranks.rows, fresh, ranks.each, strict=True):
            row.copy_(numbers)
            each.open()

    def check(self) -> None:
        for row, numbers in zip(self.ranks.rows, self.fresh, strict=True):
            assert torch.equal(row[: self.done], self.mean[: self.done])
            assert torch.equal(row[self.done :], numbers[self.done :])
        assert self.ranks.beside() == 1

    def tell(self, rank: int, amount: int) -> None:
        nbytes = min(self.ready[rank] + amount, self.count * self.width)
        assert self.ranks.tell(rank, nbytes) is (rank not in self.withdrawn)
        self.ready[rank] = nbytes

    def withdraw(self, rank: int, amount: int) -> None:
        assert self.ranks.each[rank].withdraw() is (self.done == 0)
        self.withdrawn.add(rank)

    def enter(self, rank: int) -> None:
        self.helping[rank] = self.ranks.each[rank].enter(self.ranks.rows[rank], self.divisor)
        if rank not in self.withdrawn:
            self.ready[rank] = self.count * self.width

    def help(self, rank: int) -> None:
        least = min(self.ready)
        ahead = self.count if least == self.count * self.width else least // self.piece * self.piece // self.width
        moves = not self.withdrawn and ahead > self.done
        assert self.helping[rank]() is moves
        self.done = ahead if moves else self.done

    def finish(self) -> None:
        for rank in range(self.size):
            if rank not in self.helping:
                self.enter(rank)
        self.done = self.count
        for row, each in zip(self.ranks.rows, self.ranks.each, strict=True):
            assert each.finish(row, self.divisor, True) == 0
            self.check()


@both
@settings(max_examples=3 * settings.default.max_examples)
@given(
    size=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    count=st.sampled_from([1, 4, 7, 50, 200]),
    piece=st.sampled_from([16, 48, 4096]),
    reductions=st.lists(st.tuples(STEPS, st.sampled_from([1, 2, 3])), min_size=1, max_size=3),
)
def test_what_is_ready_is_summed_once_and_nothing_else(
    size: int, dtype: torch.dtype, count: int, piece: int, reductions: list[tuple[list[tuple[str, int, int]], int]]
) -> None:
    ranks = Ranks(size, dtype, count)
    generator = torch.Generator().manual_seed(count)
    with patch.object(_shm_ahead, "_PIECE_BYTES", piece):
        for steps, divisor in reductions:
            fresh = [torch.randn(count, dtype=dtype, generator=generator) for _ in range(size)]
            reduction = Reduction(ranks, fresh, divisor, piece)
            for what, which, amount in steps:
                rank = which % size
                if rank in reduction.helping:
                    reduction.help(rank)
                elif what == "enter":
                    reduction.enter(rank)
                else:
                    getattr(reduction, what)(rank, amount)
                reduction.check()
            reduction.finish()
            ranks.number += 1


@both
def test_a_piece_is_ready_when_its_last_byte_is() -> None:
    ranks = Ranks(2, torch.float32, 8)
    with patch.object(_shm_ahead, "_PIECE_BYTES", 16):
        for each in ranks.each:
            each.open()
        helps = ranks.each[0].enter(ranks.rows[0], 2)
        for nbytes, any_is_ready in [(15, False), (16, True), (31, False), (32, True)]:
            assert ranks.tell(1, nbytes)
            assert helps() is any_is_ready


@both
def test_ranks_of_which_only_one_divides_do_not_go_on_with_each_others_sums() -> None:
    ranks = Ranks(2, torch.float32, 8)
    with patch.object(_shm_ahead, "_PIECE_BYTES", 16):
        for row in ranks.rows:
            row.fill_(3.0)
        for each in ranks.each:
            each.open()
        assert ranks.tell(1, 16)
        dividing = ranks.each[0].enter(ranks.rows[0], 2)
        assert dividing()
        summing = ranks.each[1].enter(ranks.rows[1], 1)
        assert not summing()
        # What is divided already are 4 elements.
        assert ranks.each[1].finish(ranks.rows[1], 1, False) == 4
        assert not dividing()
        assert ranks.each[0].finish(ranks.rows[0], 2, False) == 4
    assert [row.tolist() for row in ranks.rows] == [[3.0] * 4 + [6.0] * 4] * 2


@both
def test_words_of_another_call_are_none_of_this_one() -> None:
    """A rank that was told of an error may be long in another call, when a word of the last one still stands there."""
    ranks = Ranks(2, torch.float32, 4)
    with patch.object(_shm_ahead, "_PIECE_BYTES", 16):
        ranks.each[1].open()
        assert ranks.tell(1, 16)
        ranks.number += 1
        ranks.each[0].open()
        helps = ranks.each[0].enter(ranks.rows[0], 2)
        assert not helps()
        ranks.each[1].open()
        ranks.each[1].enter(ranks.rows[1], 2)
        assert helps()


@both
def test_words_are_taken_back_before_their_number_comes_again() -> None:
    ranks = Ranks(2, torch.float32, 4)
    with patch.object(_shm_ahead, "_PIECE_BYTES", 16):
        for each in ranks.each:
            each.open()
            each.enter(ranks.rows[0], 2)
        for each, row in zip(ranks.each, ranks.rows, strict=True):
            each.finish(row, 2, True)
        ranks.number += 1 << 23
        ranks.each[0].open()
        helps = ranks.each[0].enter(ranks.rows[0], 2)
        assert not helps()


@both
def test_what_was_not_open_stays_as_it_is_until_all_have_come() -> None:
    """Ranks may find then that they are about to do different things."""
    ranks = Ranks(2, torch.float32, 4)
    with patch.object(_shm_ahead, "_PIECE_BYTES", 16):
        ranks.each[0].open()
        helps = [each.enter(row, 2) for each, row in zip(ranks.each, ranks.rows, strict=True)]
        assert [each() for each in helps] == [False, False]


@both
@pytest.mark.parametrize(
    "wrong",
    [{2: 0}, {3: -1}, {4: 2}, {5: 0}, {8: 0}, {8: 20}],
    ids=["rows", "bytes", "width", "divisor", "none", "odd"],
)
def test_what_cannot_be_summed_is_refused(wrong: dict[int, int]) -> None:
    memory = torch.zeros(STRIDE + ledger_bytes(1), dtype=torch.uint8)
    given = [memory.data_ptr(), STRIDE, 1, 16, 4, 1, memory.data_ptr() + STRIDE, 1, 16, True]
    for place, value in wrong.items():
        given[place] = value
    with pytest.raises(ValueError, match="pieces of 16 bytes"):
        COMPILED["sum_ahead"](*given)


@both
@pytest.mark.parametrize("told", [(bytearray(8),), (bytearray(8), bytearray(4)), (bytes(8), bytearray(8)), (8, 8)])
def test_what_is_no_two_words_is_refused(told: tuple[Any, ...]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises((ValueError, IndexError, BufferError, TypeError)):
        COMPILED["Filling"]((parameter,), (torch.zeros(3),), 100, True, False, told)
