"""MPI types and operations that reduce a tensor correctly, and substitutes for the ones that MPI lacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from unisono.core.tensors import combine
from unisono.core.types import ReduceOp

__all__ = ["Reductions", "prepares", "reducible"]

_TYPES = {
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.float16: "INT16_T",
    torch.bfloat16: "INT16_T",
    torch.complex64: "FLOAT",
    torch.complex128: "DOUBLE",
    torch.bool: "UINT8_T",
}
_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
# On 0 and 1, the only values of a bool, these match torch's bool arithmetic.
_BOOLEAN = {
    ReduceOp.SUM: "MAX",
    ReduceOp.BOR: "MAX",
    ReduceOp.MAX: "MAX",
    ReduceOp.PRODUCT: "MIN",
    ReduceOp.BAND: "MIN",
    ReduceOp.MIN: "MIN",
    ReduceOp.BXOR: "BXOR",
}
# Sums and products that MPI lacks or computes wrongly, with the dtype in which torch computes them, for equal bits.
_CALLED_BACK = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.uint8: torch.uint8,
    torch.int8: torch.uint8,
    torch.int16: torch.int16,
    torch.uint16: torch.int16,
}
_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXTREMES = (ReduceOp.MIN, ReduceOp.MAX)


def reducible(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return whether MPI's result is right, with the same bits on all ranks."""
    if dtype not in _TYPES:
        return False
    if dtype.is_complex:
        # A product's rounding may depend on the order of its factors, which MPI chooses.
        return op is ReduceOp.SUM
    return op in _OPS


def prepares(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return whether elements are overwritten before MPI reduces them."""
    return dtype.is_floating_point and op in _EXTREMES


class Reductions:
    """Prepares tensors for a reduction by MPI.

    Sums and products of float16 and bfloat16, which MPI lacks, use an operation defined in this module, which MPI calls
    back: nothing is converted, and two bytes per element are sent. So do sums and products of 8- and 16-bit integers,
    because Open MPI 5 saturates sums where torch wraps. The minimum and maximum of floats use integers in the same
    order, because MPI loses NaNs, and keeps either of two zeros; NaN takes precedence over all numbers.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi

    def prepare(self, tensor: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, Any, Any]:
        """Return the elements to reduce, which may be overwritten, their MPI type, and MPI's operation.

        Args:
            tensor: Tensor with the elements.
            op: An operation that `reducible` allows.
        """
        dtype = tensor.dtype
        kind = getattr(self._mpi, _TYPES[dtype])
        if dtype.is_complex:
            return torch.view_as_real(tensor).view(-1), kind, self._mpi.SUM
        if prepares(dtype, op):
            _to_keys(tensor, op)
            return tensor, getattr(self._mpi, _TYPES[_INTEGER_OF_SIZE[dtype.itemsize]]), getattr(self._mpi, _OPS[op])
        return tensor, kind, self._op(dtype, op)

    def finish(self, result: torch.Tensor, op: ReduceOp) -> None:
        """Convert MPI's output to the result if `prepare` has changed the elements."""
        if prepares(result.dtype, op):
            _swap(result.view(_INTEGER_OF_SIZE[result.itemsize]))

    def _op(self, dtype: torch.dtype, op: ReduceOp) -> Any:
        if dtype in _CALLED_BACK and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            return _own(op, _CALLED_BACK[dtype])
        return getattr(self._mpi, (_BOOLEAN if dtype is torch.bool else _OPS)[op])


def _may_have_nan(tensor: torch.Tensor) -> bool:
    """Return False if there is no NaN. Uses a sum, by far the fastest test; opposite infinities also add up to NaN."""
    return math.isnan(tensor.sum().item())


def _to_keys(tensor: torch.Tensor, op: ReduceOp) -> None:
    """Convert floats in place to integers in the same order, with NaN as the extreme integer."""
    bits = tensor.view(_INTEGER_OF_SIZE[tensor.itemsize])
    info = torch.iinfo(bits.dtype)
    lost = tensor.isnan() if _may_have_nan(tensor) else None
    _swap(bits)
    if lost is not None:
        bits.masked_fill_(lost, info.max if op is ReduceOp.MAX else info.min)


def _swap(bits: torch.Tensor) -> None:
    """Convert floats' bits to integers in the same order, and back, by inverting the magnitude of negative ones."""
    info = torch.iinfo(bits.dtype)
    bits ^= (bits >> (info.bits - 1)) & info.max


# MPI keeps an operation for the whole process, and mpi4py allows only a few of them.
@cache
def _own(op: ReduceOp, dtype: torch.dtype) -> Any:
    from mpi4py import MPI

    def reduce(given: Any, total: Any, _type: Any) -> None:
        # MPI sometimes calls this with no elements; an exception in here would end the process.
        if not len(given):
            return
        with torch.inference_mode():
            low = torch.frombuffer(given, dtype=dtype)
            high = torch.frombuffer(total, dtype=dtype)
            combine(op, low, high, high)

    call: Callable[[Any, Any, Any], None] = reduce
    return MPI.Op.Create(call, commute=True)
