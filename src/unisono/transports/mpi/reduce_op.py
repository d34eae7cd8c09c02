"""MPI types and operations that reduce a tensor correctly, and substitutes for missing or incorrect operations.

MPI lacks sums and products of float16 and bfloat16; this module defines both operations as callbacks, so elements need
no conversion, and take two bytes each in messages. Sums and products of 8- and 16-bit integers also use callbacks,
because Open MPI 5 saturates sums where torch wraps around. For the minimum and maximum of floats, MPI loses NaNs, and
may return either zero if both 0.0 and -0.0 occur; these floats are therefore converted to integers that compare in the
same way, with NaN as the extreme value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from unisono.core.tensors import COMBINE
from unisono.core.types import ReduceOp

__all__ = ["finish", "prepare", "prepares", "reducible"]

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
# Operations that match torch's bool arithmetic on 0 and 1, the only values of a bool.
_BOOLEAN = {
    ReduceOp.SUM: "MAX",
    ReduceOp.BOR: "MAX",
    ReduceOp.MAX: "MAX",
    ReduceOp.PRODUCT: "MIN",
    ReduceOp.BAND: "MIN",
    ReduceOp.MIN: "MIN",
    ReduceOp.BXOR: "BXOR",
}
# Dtypes whose sums and products MPI lacks or computes wrongly, each with a dtype in which torch gives the right bits.
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


def reducible(dtype: torch.dtype, op: ReduceOp | None) -> bool:
    """Return whether MPI reduces this dtype with `op` correctly, and with bit-identical results on all ranks."""
    if dtype not in _TYPES:
        return False
    if dtype.is_complex:
        # The rounding of a complex product may depend on the order of the factors, which MPI chooses.
        return op is ReduceOp.SUM
    return op in _OPS


def prepares(dtype: torch.dtype, op: ReduceOp | None) -> bool:
    """Return whether `prepare` overwrites the elements."""
    return dtype.is_floating_point and op in _EXTREMES


def prepare(mpi: Any, tensor: torch.Tensor, op: ReduceOp | None) -> tuple[torch.Tensor, Any, Any]:
    """Return the elements to reduce, their MPI type, and MPI's operation. May overwrite the tensor.

    Args:
        mpi: The module `mpi4py.MPI`.
        tensor: Tensor to reduce.
        op: An operation that `reducible` allows.
    """
    assert op is not None
    dtype = tensor.dtype
    kind = getattr(mpi, _TYPES[dtype])
    if dtype.is_complex:
        return torch.view_as_real(tensor).view(-1), kind, mpi.SUM
    if prepares(dtype, op):
        _to_keys(tensor, op)
        return tensor, getattr(mpi, _TYPES[_INTEGER_OF_SIZE[dtype.itemsize]]), getattr(mpi, _OPS[op])
    if dtype in _CALLED_BACK and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        return tensor, kind, _own(op, _CALLED_BACK[dtype])
    return tensor, kind, getattr(mpi, (_BOOLEAN if dtype is torch.bool else _OPS)[op])


def finish(result: torch.Tensor, op: ReduceOp | None) -> None:
    """Convert MPI's output back to floats in place if `prepare` has converted the elements."""
    if prepares(result.dtype, op):
        _swap(result.view(_INTEGER_OF_SIZE[result.itemsize]))


def _to_keys(tensor: torch.Tensor, op: ReduceOp) -> None:
    """Convert floats in place to integers that compare in the same way, with NaN as the extreme integer."""
    bits = tensor.view(_INTEGER_OF_SIZE[tensor.itemsize])
    info = torch.iinfo(bits.dtype)
    # If the sum is not NaN, no element is. Checking only the sum is faster; inf - inf merely costs a second check.
    lost = tensor.isnan() if math.isnan(tensor.sum().item()) else None
    _swap(bits)
    if lost is not None:
        bits.masked_fill_(lost, info.max if op is ReduceOp.MAX else info.min)


def _swap(bits: torch.Tensor) -> None:
    """Convert floats' bits to integers that compare alike, and back: invert the magnitude bits of negative floats."""
    info = torch.iinfo(bits.dtype)
    bits ^= (bits >> (info.bits - 1)) & info.max


# Cached: MPI keeps each operation until the process exits, and mpi4py allows only a few.
@cache
def _own(op: ReduceOp, dtype: torch.dtype) -> Any:
    from mpi4py import MPI

    def reduce(given: Any, total: Any, _type: Any) -> None:
        # MPI sometimes calls this function with no elements. `frombuffer` would then raise an exception, which would
        # terminate the process.
        if not len(given):
            return
        with torch.inference_mode():
            low = torch.frombuffer(given, dtype=dtype)
            high = torch.frombuffer(total, dtype=dtype)
            COMBINE[op](low, high, out=high)

    call: Callable[[Any, Any, Any], None] = reduce
    return MPI.Op.Create(call, commute=True)
