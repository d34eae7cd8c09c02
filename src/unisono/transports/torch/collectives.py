"""Torch's collectives: the calls that they support correctly, and how each is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unisono.core.call import Call
from unisono.core.collective import FAMILIES
from unisono.core.types import ReduceOp

__all__ = ["NATIVE", "carries", "start"]

_NUMBERS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_NUMBERS |= {torch.int8, torch.uint8, torch.int32, torch.int64}
_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
# On 0 and 1, the only values of a bool, these match torch's bool arithmetic.
_BOOLEAN = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
}


def carries(call: Call, cuda: bool) -> bool:
    """Return whether torch's collective gives the right result. The same answer on every rank."""
    if call.lengths:
        return False
    if call.name == "all_gather":
        # Gloo gathers into separate memory first, and copies: long messages take up to twice as long as with an
        # algorithm.
        return len({t.numel() for t in call.outputs}) == 1 and (cuda or sum(t.nbytes for t in call.outputs) < 4 << 20)
    if call.name == "reduce_scatter" and len({t.numel() for t in call.inputs}) != 1:
        return False
    return not FAMILIES[call.name].reduces or _reduces(call, cuda)


def _reduces(call: Call, cuda: bool) -> bool:
    assert call.op is not None
    dtype = call.inputs[0].dtype
    if dtype is torch.bool:
        return call.op in _BOOLEAN
    if dtype.is_complex:
        return call.op is ReduceOp.SUM
    if dtype not in _NUMBERS:
        return False
    if call.op in _BITWISE:
        return not cuda
    # Torch's backends lose NaN in the minimum and maximum of floats.
    return call.op in _ARITHMETIC or not dtype.is_floating_point


def start(backend: Any, call: Call, device: int | None = None) -> Any:
    """Start torch's work for this call, on a GPU with nccl; return None if there is no data to move."""
    if call.name == "barrier":
        options = dist.BarrierOptions()
        options.device_ids = [] if device is None else [device]
        return backend.barrier(options)
    tensors = (*call.inputs, *call.outputs)
    if tensors and not any(t.numel() for t in tensors):
        return None
    return _START[call.name](backend, call)


def _all_reduce(backend: Any, call: Call) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = _torch_op(call)
    return backend.allreduce([_plain(call.outputs[0])], options)


def _reduce(backend: Any, call: Call) -> Any:
    options = dist.ReduceOptions()
    options.reduceOp = _torch_op(call)
    options.rootRank = _root(call)
    options.rootTensor = 0
    return backend.reduce([_plain(call.inputs[0])], options)


def _reduce_scatter(backend: Any, call: Call) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _torch_op(call)
    return backend.reduce_scatter([_plain(call.outputs[0])], [[_plain(t) for t in call.inputs]], options)


def _broadcast(backend: Any, call: Call) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = _root(call)
    options.rootTensor = 0
    return backend.broadcast([_bytes(call.outputs[0])], options)


def _gather(backend: Any, call: Call) -> Any:
    options = dist.GatherOptions()
    options.rootRank = _root(call)
    outputs = [[_bytes(t) for t in call.outputs]] if call.outputs else []
    return backend.gather(outputs, [_bytes(call.inputs[0])], options)


def _scatter(backend: Any, call: Call) -> Any:
    options = dist.ScatterOptions()
    options.rootRank = _root(call)
    inputs = [[_bytes(t) for t in call.inputs]] if call.inputs else []
    return backend.scatter([_bytes(call.outputs[0])], inputs, options)


def _all_gather(backend: Any, call: Call) -> Any:
    return backend.allgather([[_bytes(t) for t in call.outputs]], [_bytes(call.inputs[0])])


_START: dict[str, Callable[[Any, Call], Any]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather": _all_gather,
}

NATIVE = frozenset({*_START, "barrier"})
"""Supported collectives. all_to_all is missing, because torch needs equal parts or one tensor, unlike the schedule."""


def _torch_op(call: Call) -> Any:
    assert call.op is not None
    op = _BOOLEAN[call.op] if call.inputs[0].dtype is torch.bool else call.op
    return getattr(dist.ReduceOp, op.name)


def _root(call: Call) -> int:
    assert call.root is not None
    return call.root


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a dtype that torch's backends reduce."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes, because moving data needs no dtype."""
    return tensor.view(torch.uint8)
