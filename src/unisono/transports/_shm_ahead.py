"""Sums made ahead: of what all ranks have laid ready, by those that wait for the others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from unisono.compiled import part
from unisono.errors import MismatchError
from unisono.transports._shm_memory import PAGE_BYTES

__all__ = ["Ahead", "compiled_sums", "ledger_bytes"]

_sum_ahead, _stop, _sum_rows = part("sum_ahead"), part("stop_sums"), part("sum_rows")

_LINE = 64
_PIECE_BYTES = 128 << 10
"""Of each row; so much is claimed at once."""
_OPEN, _BYTES_BITS, _NUMBER_BITS = 1 << 63, 40, 23
_DIVIDED = 1 << 30
"""As in src/compiled/ahead.c."""


def ledger_bytes(size: int) -> int:
    """Memory behind the rows of so many ranks, in which they tell what is ready: whole pages."""
    return -(-_LINE * (size + 1) // PAGE_BYTES) * PAGE_BYTES


def compiled_sums() -> bool:
    """Whether this rank can sum what is ready: that needs words that several ranks may change."""
    return _sum_ahead is not None


class Ahead:
    """Rows of memory, one a rank, of which ranks tell how much lies ready for the next reduction of all of them.

    A rank that is in that reduction already, and waits for others, claims pieces that are ready in all rows, sums them,
    and writes the sums to all rows. When all have come they share out what is left in the same way, so that the slower
    one finds most of it done. Sums are taken in the order of ranks, whoever makes them.

    Each rank has a word: the number of the reduction, and how many of its row's bytes are ready. One more word for all
    tells which pieces are claimed, and whether their sums are divided.

    Args:
        memory: All rows, and the ledger behind them.
        stride: Bytes of a row.
        rank, size: Whose row is this rank's, and how many rows there are.
        number: Of the reduction that comes next, the same on all ranks.

    Attributes:
        told: As `Ready.told`.
    """

    def __init__(self, memory: torch.Tensor, stride: int, rank: int, size: int, number: Callable[[], int]) -> None:
        self._start, self._stride, self._rank, self._size = memory.data_ptr(), stride, rank, size
        self._number = number
        self._ledger = self._start + stride * size
        handed_out: Any = ctypes.c_uint64.from_address(self._ledger + _LINE * rank)
        handed_out.memory = memory
        self._word = memoryview(handed_out).cast("B").cast("Q")
        self._tag = memoryview(bytearray(8)).cast("Q")
        self.told = self._word, self._tag
        self._spoiled = False

    # -- while the row fills --------------------------------------------------------------------
    def open(self) -> None:
        """As `Ready.open`."""
        self._tag[0] = self._tagged()

    def withdraw(self) -> bool:
        """As `Ready.withdraw`."""
        if self._tag[0]:
            self._tag[0] = 0
            self._spoiled = _stop(self._ledger, self._size, self._number()) != 0
        return not self._spoiled

    def _tagged(self) -> int:
        return _OPEN | (self._number() & ((1 << _NUMBER_BITS) - 1)) << _BYTES_BITS

    # -- in the reduction -----------------------------------------------------------------------
    def enter(self, tensor: torch.Tensor, divisor: int) -> Callable[[], bool]:
        """All of this rank's part is ready: a tensor at the beginning of its row.

        If it was not open, nothing changes before all ranks have come, and been compared. Returns what sums, as long as
        ranks are missing, what lies ready; and whether there was any.
        """
        self._now = self._number()
        self._word[0] = self._tag[0] + tensor.nbytes
        self._tag[0] = 0
        self._spoiled = False
        given = self._given(tensor, divisor)
        return lambda: _sum_ahead(*given, False)

    def _given(self, tensor: torch.Tensor, divisor: int) -> tuple[int, ...]:
        width = tensor.element_size()
        return (
            *(self._start, self._stride, self._size, tensor.nbytes, width, divisor),
            *(self._ledger, self._now, _PIECE_BYTES),
        )

    def finish(self, tensor: torch.Tensor, divisor: int, alike: bool) -> int:
        """All ranks have come: sum what nobody has claimed.

        Where not all ranks divide here (`alike`), nothing more is divided. Returns how many elements have been.
        """
        # Those that wait do not read it any more; some day its number comes again.
        self._word[0] = 0
        if alike:
            _sum_ahead(*self._given(tensor, divisor), True)
            return 0
        claimed, width, count = _stop(self._ledger, self._size, self._now), tensor.element_size(), tensor.numel()
        done = min(count, (claimed & (_DIVIDED - 1)) * _PIECE_BYTES // width)
        first, last = (done + r * (count - done) // self._size for r in (self._rank, self._rank + 1))
        _sum_rows(self._start + first * width, self._stride, self._size, last - first, width, 1)
        return done if claimed & _DIVIDED else 0

    def check(self) -> None:
        """All ranks have come, but their tensors do not all lie here."""
        if _stop(self._ledger, self._size, self._now):
            raise MismatchError(
                "a rank has told that memory of empty() was ready for its all_reduce, and called another one: some of "
                "that memory is summed already"
            )
