"""Memory that `empty` hands out: a slice of shared memory for each rank, reduced where it lies."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from unisono.compiled import part
from unisono.control import Control
from unisono.group import Group
from unisono.reduction import combine_all, divide
from unisono.transport import Ready
from unisono.transports._shm_ahead import Ahead, ledger_bytes
from unisono.transports._shm_memory import PAGE_BYTES, meet
from unisono.types import ReduceOp

__all__ = ["Arenas"]

_PLACE_BITS = 44
_MOST_PLANS = 64
_PIECE_BYTES, _PIECE_BYTES_OF_TWO = 256 << 10, 512 << 10
"""Of each row. Those of two ranks are fewer bytes together."""
_SUMS = (ReduceOp.SUM, ReduceOp.AVG)
_sum_rows = part("sum_rows")
"""The sum of rows, divided and written to all of them in one pass; None where it is not compiled."""
_IN_ONE_PASS = (torch.float32, torch.float64)
_AHEAD_BYTES = 1 << 20
"""From here on ranks that wait for others sum what is ready."""


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """A map of its own; Python's would hold a descriptor for as long as it lives, and a process has few of these."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8, device="cpu")


def _drop(arenas: weakref.ref[Arenas], number: int) -> None:
    """Its last tensor is gone. It may outlive all else, which it must not keep."""
    found = arenas()
    if found is not None:
        found._arenas.pop(number, None)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some columns that one rank reduces: a row a rank, the rank's own row, and the others."""

    block: torch.Tensor
    own: torch.Tensor
    others: list[torch.Tensor]


@dataclass(slots=True, eq=False)
class _Arena:
    """One piece of shared memory. Its views are kept here, and dropped with the last tensor of this rank in it."""

    number: int
    start: int
    stride: int
    rows: torch.Tensor
    ahead: Ahead | None
    plans: dict[tuple[int, int, torch.dtype], list[_Piece]] = field(default_factory=dict)


class Arenas:
    """The memory of one group that its ranks can reduce in place.

    Each call of `empty` is an anonymous file of its own, with one equal slice a rank, so the same
    offset in every rank's slice belongs together. It is unmapped when the last tensor on it dies.

    Args:
        group, control, timeout_s: Whose memory it is, and how these meet in it.
        number: The number of the next call of theirs, if ranks that wait for others in it are to sum what is ready.
    """

    def __init__(
        self, group: Group, control: Control, timeout_s: float, number: Callable[[], int] | None = None
    ) -> None:
        self._group, self._control, self._timeout_s, self._number = group, control, timeout_s, number
        self._rank, self._size = group.rank, group.size
        self._arenas: dict[int, _Arena] = {}
        self._kept: dict[torch.dtype, torch.Tensor] = {}
        self._piece_bytes = _PIECE_BYTES_OF_TWO if group.size == 2 else _PIECE_BYTES
        self.made = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of this rank. Collective: the same shape and dtype on every rank."""
        self.made += 1
        count, rank, size = math.prod(shape), self._rank, self._size
        stride = max(1, -(-count * dtype.itemsize // PAGE_BYTES)) * PAGE_BYTES
        with torch.inference_mode(mode=False):
            number = self._number if dtype in _IN_ONE_PASS and count * dtype.itemsize >= _AHEAD_BYTES else None
            nbytes = stride * size + (0 if number is None else ledger_bytes(size))
            memory = meet(self._group, self._control, f"arena {self.made}", nbytes, self._timeout_s, _mapped)
            rows = memory[: stride * size].view(size, stride)
            handed_out: Any = (ctypes.c_ubyte * stride).from_address(rows[rank].data_ptr())
            tensor = torch.frombuffer(handed_out, dtype=torch.uint8)
        handed_out.memory = memory
        ahead = None if number is None else Ahead(memory, stride, rank, size, number)
        self._arenas[self.made] = _Arena(self.made, tensor.data_ptr(), stride, rows, ahead)
        # A tensor and its views keep alive what they were made from, and nothing else does.
        weakref.finalize(handed_out, partial(_drop, weakref.ref(self), self.made)).atexit = False
        return tensor[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    def place(self, tensor: torch.Tensor) -> int:
        """Where a contiguous tensor lies, the same number on each rank for the same offset; 0 if elsewhere."""
        start = tensor.data_ptr()
        for arena in list(self._arenas.values()):
            if arena.start <= start and start + tensor.nbytes <= arena.start + arena.stride:
                return arena.number << _PLACE_BITS | (start - arena.start + 1)
        return 0

    def ready(self, memory: torch.Tensor) -> Ready | None:
        """As `Transport.ready`."""
        place = self.place(memory) if memory.is_contiguous() else 0
        return self.ahead(place, memory, ReduceOp.SUM)

    def ahead(self, place: int, tensor: torch.Tensor, op: ReduceOp) -> Ahead | None:
        """Where ranks tell how much of a tensor at a place is ready to be reduced so, if anywhere."""
        if op not in _SUMS or tensor.dtype not in _IN_ONE_PASS or tensor.nbytes < _AHEAD_BYTES or not place:
            return None
        arena, offset = self._at(place)
        return None if offset else arena.ahead

    def reduce(self, place: int, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduce this rank's share of the elements at a place where all ranks' tensors lie, into all of them."""
        if _sum_rows is not None and op in _SUMS and tensor.dtype in _IN_ONE_PASS:
            self._sum(place, tensor, self._size if op is ReduceOp.AVG else 1)
            return
        pieces = self._pieces(place, tensor)
        together = op in _SUMS and self._size > 2 and tensor.is_floating_point()
        for piece in pieces:
            if together:
                # Torch clears the place of a sum before it reads, so that may be none of the rows.
                total = self._scratch(tensor.dtype)[: piece.own.numel()]
                torch.sum(piece.block, 0, out=total)
                if op is ReduceOp.AVG:
                    divide(total, self._size)
                piece.block.copy_(total)
            else:
                # One rank alone reduces this share, so any order gives everybody the same bits.
                combine_all(op, [piece.own, *piece.others], piece.own)
                if op is ReduceOp.AVG:
                    divide(piece.own, self._size)
                for row in piece.others:
                    row.copy_(piece.own)

    def _sum(self, place: int, tensor: torch.Tensor, divisor: int) -> None:
        """Sum this rank's share in the order of ranks, and divide it."""
        arena, offset = self._at(place)
        first, last = self._share(tensor.numel())
        width, rank = tensor.element_size(), self._rank
        start = arena.start - rank * arena.stride + offset + first * width
        _sum_rows(start, arena.stride, self._size, last - first, width, divisor)

    def _at(self, place: int) -> tuple[_Arena, int]:
        return self._arenas[place >> _PLACE_BITS], (place & ((1 << _PLACE_BITS) - 1)) - 1

    def _share(self, count: int) -> tuple[int, int]:
        """Which of so many columns this rank reduces."""
        rank, size = self._rank, self._size
        return rank * count // size, (rank + 1) * count // size

    def _scratch(self, dtype: torch.dtype) -> torch.Tensor:
        kept = self._kept.get(dtype)
        if kept is None:
            with torch.inference_mode(mode=False):
                kept = self._kept[dtype] = torch.empty(self._piece_bytes // dtype.itemsize, dtype=dtype, device="cpu")
        return kept

    def _pieces(self, place: int, tensor: torch.Tensor) -> list[_Piece]:
        """This rank's share of the columns, cut up so that what is summed is still in the cache when it is copied."""
        arena, offset = self._at(place)
        key = (offset, tensor.nbytes, tensor.dtype)
        plan = arena.plans.get(key)
        if plan is None:
            if len(arena.plans) >= _MOST_PLANS:
                arena.plans.clear()
            with torch.inference_mode(mode=False):
                table = arena.rows[:, offset : offset + tensor.nbytes].view(tensor.dtype)
                plan = arena.plans[key] = list(self._cut(table))
        return plan

    def _cut(self, table: torch.Tensor) -> Iterator[_Piece]:
        rank = self._rank
        first, last = self._share(table.shape[1])
        step = max(1, self._piece_bytes // table.element_size())
        for low in range(first, last, step):
            block = table[:, low : min(low + step, last)]
            yield _Piece(block, block[rank], [row for r, row in enumerate(block.unbind(0)) if r != rank])
