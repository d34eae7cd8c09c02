"""The shorter way through shared memory: all_reduce and barrier with nothing made anew for each call."""

from __future__ import annotations

from typing import Any

import torch

from unisono.fingerprint import Fingerprint
from unisono.reduction import HALVES, check_reducible, combine, divide, parse_op
from unisono.site import call_site
from unisono.tensors import is_locked
from unisono.transport import Tensors
from unisono.transports._shm_board import Board
from unisono.transports._shm_marks import Mark, mark_of
from unisono.transports._shm_rounds import Rounds
from unisono.types import ReduceOp

__all__ = ["QuickRounds"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_MOST = 256
_BARRIER = mark_of("barrier", ReduceOp.BOR, None, None, ())

_Recipe = tuple[ReduceOp, int, Mark, tuple[list[torch.Tensor], list[torch.Tensor]] | None]


class QuickRounds:
    """Calls on plain dense tensors: what depends on dtype, length and operation alone is kept."""

    names = frozenset({"all_reduce", "barrier"})

    def __init__(self, board: Board, rounds: Rounds) -> None:
        self._board, self._rounds = board, rounds
        self._recipes: dict[tuple[str, torch.dtype, int], _Recipe] = {}
        self._now: tuple[str, str | None, torch.Tensor | None] | None = None

    def letter(self, name: str, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """As `Quick.letter`."""
        return

    def call(self, name: str, target: Any, source: Tensors, op: str, root: int | None, deadline: float) -> bool:
        """As `Quick.call`."""
        if name == "barrier":
            self._now = (name, None, None)
            self._rounds.first(_BARRIER, deadline)
            self._now = None
            return True
        tensor = target
        # As `is_plain`, but for negative views, which torch reads rightly: there is less than a microsecond for it.
        if type(tensor) not in _PLAIN or tensor.requires_grad or tensor.layout is not _STRIDED:
            return False
        if not tensor.is_contiguous() or not tensor.is_cpu:
            return False
        if is_locked(tensor):
            return False
        key = (op, tensor.dtype, tensor.numel())
        recipe = self._recipes.get(key) or self._prepare(key)
        if recipe is None:
            return False
        by, divisor, mark, stages = recipe
        self._now = ("all_reduce", op, tensor)
        flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        if stages is None or self._rounds.may_lie_in_place(tensor.nbytes):
            # Where it lies in shared memory, an average is divided on the way.
            self._rounds.all_reduce(flat, ReduceOp.AVG if divisor else by, mark, deadline)
            divisor = 0
        else:
            board = self._board
            views = stages[(board.round + 1) & 1]
            views[board.rank].copy_(flat)
            self._rounds.first(mark, deadline)
            if by is ReduceOp.SUM and board.size == 2:
                # Adding in place is the fastest. In the order of ranks: of two NaNs, the first one's bits stay.
                low, high = (views[0], flat) if board.rank else (flat, views[1])
                torch.add(low, high, out=flat)
            else:
                combine(by, views[0], views[1], flat)
                for view in views[2:]:
                    combine(by, flat, view, flat)
        if divisor:
            divide(flat, divisor)
        self._now = None
        return True

    def fingerprint(self) -> Fingerprint | None:
        """Of the call that is being made this way, if any."""
        if self._now is None:
            return None
        name, op, tensor = self._now
        if tensor is None:
            return Fingerprint(0, name, ReduceOp.BOR.value, algorithm="native", site=call_site())
        return Fingerprint(
            0,
            name,
            parse_op(op).value,
            dtype=str(tensor.dtype).removeprefix("torch."),
            counts=(tensor.numel(),),
            device="cpu",
            algorithm="native",
            shape=tuple(tensor.shape),
            site=call_site(),
        )

    def _prepare(self, key: tuple[str, torch.dtype, int]) -> _Recipe | None:
        """What calls of this kind need; None if they need more preparation than is made here."""
        name, dtype, count = key
        op = parse_op(name)
        check_reducible(op, dtype)
        if (op is ReduceOp.AVG and dtype in HALVES) or dtype.is_complex:
            # Halves are divided first, and a complex tensor may be a conjugate view.
            return None
        by, divisor = (ReduceOp.SUM, self._board.size) if op is ReduceOp.AVG else (op, 0)
        stages = None
        if count * dtype.itemsize <= self._rounds.one_shot_bytes:
            stages = (self._rounds.heads(0, dtype, count), self._rounds.heads(1, dtype, count))
        if len(self._recipes) >= _MOST:
            self._recipes.clear()
        recipe = by, divisor, mark_of("all_reduce", op, dtype, None, (count,)), stages
        self._recipes[key] = recipe
        return recipe
