"""Reduction of two tensors to one for each reduce operation, and the dtypes that each supports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from unisono.core.types import ReduceOp

__all__ = ["HALVES", "SUMS", "check_reducible", "combine", "combine_all", "divide", "parse_op"]

HALVES = (torch.float16, torch.bfloat16, torch.complex32)
"""Averages of these divide before they sum, so that the sum does not overflow."""

SUMS = (ReduceOp.SUM, ReduceOp.AVG)
"""Operations that are sums, before any division."""

_known: set[tuple[ReduceOp, torch.dtype]] = set()
"""Dtypes that an operation was found to reduce."""

_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def combine(op: ReduceOp, low: torch.Tensor, high: torch.Tensor, out: torch.Tensor) -> None:
    """Write `low` op `high` to `out` (which may be either). `low` is the lower rank's, so that bits agree."""
    _COMBINE[op](low, high, out=out)


def combine_all(op: ReduceOp, shares: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Reduce the shares in order into `total`, which may be one of the first two."""
    if len(shares) == 1:
        total.copy_(shares[0])
        return
    for i, share in enumerate(shares[1:], 1):
        combine(op, shares[0] if i == 1 else total, share, total)


def divide(total: torch.Tensor, size: int) -> None:
    """Divide in place, by the faster multiplication where the bits are the same. Complex numbers by their parts."""
    total = torch.view_as_real(total) if total.is_complex() else total
    if size.bit_count() == 1 and total.is_floating_point():
        total.mul_(1 / size)
    else:
        total.div_(size)


def parse_op(op: str | ReduceOp | object) -> ReduceOp:
    """A `ReduceOp` from its name, or from torch's own `ReduceOp`; `ValueError` lists the known.

    Example:
        >>> parse_op("SUM")
        <ReduceOp.SUM: 'sum'>
    """
    name = str(getattr(op, "op", op)).rsplit(".", 1)[-1].lower()
    try:
        return ReduceOp(name)
    except ValueError:
        known = ", ".join(member.value for member in ReduceOp)
        raise ValueError(f"unknown reduce operation {op!r}; known: {known}") from None


def check_reducible(op: ReduceOp, dtype: torch.dtype) -> None:
    """Raise `ValueError` if torch cannot reduce this dtype by this operation."""
    if op is ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"avg of {dtype} would lose the fraction: use op='sum' and divide yourself, or convert to a float dtype"
        )
    if not _reducible(op, dtype):
        raise ValueError(f"torch does not support {op.value} on {dtype}; convert the tensor first")


def _reducible(op: ReduceOp, dtype: torch.dtype) -> bool:
    if (op, dtype) in _known:
        return True
    try:
        # A mode set by the user must not decide for the whole process; nor must a failure, for any reason.
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            one = torch.ones(1, dtype=dtype, device="cpu")
            combine(op, one, one.clone(), one)
            if op is ReduceOp.AVG:
                divide(one, 3)
    except (RuntimeError, TypeError):
        return False
    _known.add((op, dtype))
    return True
