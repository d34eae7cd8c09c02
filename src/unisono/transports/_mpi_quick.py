"""The shorter way by MPI: all_reduce and barrier with nothing made anew for each call."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from unisono.fingerprint import Fingerprint
from unisono.reduction import HALVES, check_reducible, parse_op
from unisono.site import call_site
from unisono.transports._mpi_agreement import word_of
from unisono.transports._mpi_native import Native
from unisono.transports._mpi_parts import LONGEST
from unisono.types import ReduceOp

__all__ = ["QuickCalls"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST = 256

_Recipe = tuple[int, Any, Any, int]


class QuickCalls:
    """Calls on plain dense tensors: what depends on dtype, length and operation alone is kept.

    Args:
        agree: What `MpiTransport` does before a call: takes the call's word, and a deadline.
        native: Makes the call.
        size: How many ranks there are.
    """

    def __init__(self, agree: Callable[[int, float], None], native: Native, size: int) -> None:
        self._agree, self._native, self._size = agree, native, size
        self._recipes: dict[tuple[str, torch.dtype, int], _Recipe] = {}
        self._now: tuple[str, str, torch.Tensor | None] | None = None
        self._barrier = word_of(_fingerprint("barrier", ReduceOp.BOR, None).compared()[1:])

    def all_reduce(self, tensor: torch.Tensor, op: str, timeout: float) -> bool:
        """As `Quick.all_reduce`."""
        if type(tensor) not in _PLAIN or tensor.requires_grad or not tensor.is_contiguous() or not tensor.is_cpu:
            return False
        key = (op, tensor.dtype, tensor.numel())
        recipe = self._recipes.get(key) or self._prepare(key)
        if recipe is None:
            return False
        word, kind, by, divisor = recipe
        deadline = monotonic() + timeout
        self._now = ("all_reduce", op, tensor)
        self._agree(word, deadline)
        self._now = None
        self._native.all_reduce(tensor, kind, by, deadline)
        if divisor:
            tensor.div_(divisor)
        return True

    def barrier(self, timeout: float) -> bool:
        """As `Quick.barrier`."""
        self._now = ("barrier", ReduceOp.BOR.value, None)
        self._agree(self._barrier, monotonic() + timeout)
        self._now = None
        return True

    def fingerprint(self) -> Fingerprint | None:
        """Of the call that is being made this way, if any."""
        if self._now is None:
            return None
        name, op, tensor = self._now
        return _fingerprint(name, parse_op(op), tensor)

    def _prepare(self, key: tuple[str, torch.dtype, int]) -> _Recipe | None:
        """What calls of this kind need; None if they need more preparation than is made here."""
        name, dtype, count = key
        op = parse_op(name)
        check_reducible(op, dtype)
        if (op is ReduceOp.AVG and dtype in HALVES) or count > LONGEST or not count:
            return None
        by = ReduceOp.SUM if op is ReduceOp.AVG else op
        found = self._native.reductions.plain(dtype, by)
        if found is None:
            return None
        example = torch.empty(0, dtype=dtype).expand(0)
        word = word_of(_fingerprint("all_reduce", op, example, count).compared()[1:])
        if len(self._recipes) >= _MOST:
            self._recipes.clear()
        recipe = self._recipes[key] = word, *found, self._size if op is ReduceOp.AVG else 0
        return recipe


def _fingerprint(name: str, op: ReduceOp, tensor: torch.Tensor | None, count: int | None = None) -> Fingerprint:
    """The same as the engine makes of a call that goes the long way."""
    if tensor is None:
        return Fingerprint(0, name, op.value, algorithm="native", site=call_site())
    return Fingerprint(
        0,
        name,
        op.value,
        dtype=str(tensor.dtype).removeprefix("torch."),
        counts=(tensor.numel() if count is None else count,),
        device="cpu",
        algorithm="native",
        shape=tuple(tensor.shape),
        site=call_site(),
    )
