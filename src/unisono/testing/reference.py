"""Reference results of reductions, computed directly from all ranks' inputs, with the allowed error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from unisono.core.types import ReduceOp

__all__ = ["DTYPES", "EXACT", "Expected", "ops_for", "permuted", "reduced"]

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
"""Every dtype with which collectives are tested."""

EXACT = tuple(dtype for dtype in DTYPES if not (dtype.is_floating_point or dtype.is_complex))
"""Dtypes whose sums are not rounded."""

_BITS = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def ops_for(dtype: torch.dtype) -> tuple[ReduceOp, ...]:
    """Return the operations that are defined for a dtype, all of which every backend must support.

    Args:
        dtype: Any of `DTYPES`.

    Example:
        >>> [op.value for op in ops_for(torch.complex64)]
        ['sum', 'avg', 'product']
    """
    if dtype.is_complex:
        return ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT
    if dtype.is_floating_point:
        return ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX
    return ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *_BITS


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """Expected contents of a tensor.

    Attributes:
        value: The expected elements, in a wider dtype where rounding is allowed.
        slack: The largest allowed difference per element; None if the result must be equal bit for bit.

    Example:
        >>> Expected(torch.tensor([1.0]), slack=torch.tensor([0.1])).complaint(torch.tensor([1.05]))
        ''
    """

    value: torch.Tensor
    slack: torch.Tensor | None = None

    def complaint(self, found: torch.Tensor) -> str:
        """Return a description of the first wrong element of a result; empty if all elements are right.

        Args:
            found: The result: one-dimensional, with the dtype of the tensors that were reduced.

        Example:
            >>> permuted(torch.tensor([1, 2])).complaint(torch.tensor([1, 3]))
            'element 1 of 2 is 3, not 2'
        """
        if found.numel() != self.value.numel():
            return f"there are {found.numel()} elements, not {self.value.numel()}"
        wrong = self._wrong(found).nonzero()
        if not wrong.numel():
            return ""
        first = int(wrong[0])
        slack = "" if self.slack is None else f" within {self.slack[first].item():.3g}"
        return f"element {first} of {found.numel()} is {found[first].item()}, not {self.value[first].item()}{slack}"

    def _wrong(self, found: torch.Tensor) -> torch.Tensor:
        """Return the mask of the wrong elements."""
        if self.slack is None:
            return (_bytes(found) != _bytes(self.value)).any(1)
        wide = found.to(self.value.dtype)
        near = ((wide - self.value).abs() <= self.slack) | (wide == self.value)
        return ~torch.where(self.value.isnan(), wide.isnan(), near)


def permuted(tensor: torch.Tensor) -> Expected:
    """Return the expectation that a result has exactly these elements, bit for bit.

    Args:
        tensor: One-dimensional.
    """
    return Expected(tensor)


def reduced(tensors: Sequence[torch.Tensor], op: str | ReduceOp) -> Expected:
    """Return the expected reduction of all ranks' one-dimensional tensors.

    Results must be exact for integers and bools (which wrap around, as in torch), for minima and maxima (NaN wins), and
    for sums and products of integer-valued floats if they are small enough. For all other results, `slack` is the usual
    bound: the rounding unit times the number of ranks times the sum of magnitudes (Higham, "Accuracy and Stability of
    Numerical Algorithms", chapters 3 and 4).

    Args:
        tensors: CPU tensors, one from each rank, of equal length and the same dtype (one of `DTYPES`).
        op: An operation that is defined for the dtype; see `ops_for`.

    Example:
        >>> reduced([torch.tensor([1.0]), torch.tensor([2.0])], "sum").value
        tensor([3.], dtype=torch.float64)
    """
    op = ReduceOp(op)
    dtype = tensors[0].dtype
    if op in _BITS:
        return Expected(reduce(_BITS[op], tensors))
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return _extreme(torch.stack(list(tensors)), op)
    if not (dtype.is_floating_point or dtype.is_complex):
        wide = torch.stack(list(tensors)).to(torch.int64)
        return Expected((wide.sum(0) if op is ReduceOp.SUM else wide.prod(0)).to(dtype))
    return _rounded(torch.stack(list(tensors)), op)


def _extreme(stack: torch.Tensor, op: ReduceOp) -> Expected:
    wide = stack.to(torch.float64 if stack.is_floating_point() else torch.int64)
    value = wide.amin(0) if op is ReduceOp.MIN else wide.amax(0)
    if not stack.is_floating_point():
        return Expected(value.to(stack.dtype))
    value[wide.isnan().any(0)] = torch.nan
    return Expected(value, torch.zeros_like(value))


def _rounded(stack: torch.Tensor, op: ReduceOp) -> Expected:
    size = len(stack)
    info = torch.finfo(stack.dtype)
    wide = stack.to(torch.complex128 if stack.is_complex() else torch.float64)
    whole = (torch.view_as_real(wide).frac() == 0).all(-1) if wide.is_complex() else wide.frac() == 0
    magnitudes = wide.abs()
    value, magnitude = (
        (wide.prod(0), magnitudes.prod(0)) if op is ReduceOp.PRODUCT else (wide.sum(0), magnitudes.sum(0))
    )
    # A complex product consists of four real products, and the magnitudes of a number's real and imaginary parts add up
    # to more than the number's magnitude.
    slack = magnitude * info.eps * size * (4 if wide.is_complex() else 1) + size * info.smallest_normal * info.eps
    if op is ReduceOp.AVG:
        return Expected(value / size, (slack + magnitude * info.eps) / size + size * info.smallest_normal * info.eps)
    exact = whole.all(0) & (2 * magnitude <= 1 / info.eps)
    return Expected(value, torch.where(exact, 0.0, slack))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return one row of bytes for each element."""
    return tensor.contiguous().view(torch.uint8).view(tensor.numel(), tensor.element_size())
