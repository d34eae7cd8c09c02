"""Torch's collectives: which reductions give correct results, and how to start each collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from unisono.core.call import Call
from unisono.core.types import ReduceOp

__all__ = ["ON_CPU", "ON_GPU", "START"]

_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_INTEGERS = {torch.int8, torch.uint8, torch.int32, torch.int64}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_VIEWED = {torch.bool, *_COMPLEX}
_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
# Operations that match torch's bool arithmetic on 0 and 1, the only values of a bool.
_BOOLEAN = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
}


def _named(dtypes: Iterable[torch.dtype], ops: Iterable[ReduceOp]) -> dict[tuple[torch.dtype, ReduceOp | None], Any]:
    return {(dtype, op): getattr(dist.ReduceOp, op.name) for dtype in dtypes for op in ops}


ON_GPU: dict[tuple[torch.dtype, ReduceOp | None], Any] = {
    # Exclude minimum and maximum of floats, because torch's backends lose NaNs in these operations.
    **_named(_FLOATS, _ARITHMETIC),
    **_named(_INTEGERS, (*_ARITHMETIC, ReduceOp.MIN, ReduceOp.MAX)),
    **_named(_COMPLEX, (ReduceOp.SUM,)),
    **{(torch.bool, op): getattr(dist.ReduceOp, other.name) for op, other in _BOOLEAN.items()},
}
"""Reductions for which torch's collectives give the correct result, and torch's operation for each."""

ON_CPU = {**ON_GPU, **_named(_INTEGERS, _BITWISE)}


def _options(kind: type[Any], call: Call) -> Any:
    """Return torch's options for a call, with its operation, if any, and its root, if options of this kind have one."""
    options = kind()
    if call.op is not None:
        options.reduceOp = ON_CPU[call.inputs[0].dtype, call.op]
    if hasattr(options, "rootRank"):
        # If the call had no root, torch would raise a TypeError here; the default would be rank 0.
        options.rootRank = call.root
    return options


def _barrier(backend: Any, _: Call, device: int | None) -> Any:
    options = dist.BarrierOptions()
    options.device_ids = [] if device is None else [device]
    return backend.barrier(options)


def _all_reduce(backend: Any, call: Call, _: int | None) -> Any:
    # Most programs' time goes into this collective, so call as few functions as possible.
    tensor = call.outputs[0]
    options = dist.AllreduceOptions()
    options.reduceOp = ON_CPU[call.inputs[0].dtype, call.op]
    return backend.allreduce([_plain(tensor) if tensor.dtype in _VIEWED else tensor], options)


def _reduce(backend: Any, call: Call, _: int | None) -> Any:
    return backend.reduce([_plain(call.inputs[0])], _options(dist.ReduceOptions, call))


def _reduce_scatter(backend: Any, call: Call, _: int | None) -> Any:
    inputs = [[_plain(t) for t in call.inputs]]
    return backend.reduce_scatter([_plain(call.outputs[0])], inputs, _options(dist.ReduceScatterOptions, call))


def _broadcast(backend: Any, call: Call, _: int | None) -> Any:
    return backend.broadcast([_bytes(call.outputs[0])], _options(dist.BroadcastOptions, call))


def _gather(backend: Any, call: Call, _: int | None) -> Any:
    outputs = [[_bytes(t) for t in call.outputs]] if call.outputs else []
    return backend.gather(outputs, [_bytes(call.inputs[0])], _options(dist.GatherOptions, call))


def _scatter(backend: Any, call: Call, _: int | None) -> Any:
    inputs = [[_bytes(t) for t in call.inputs]] if call.inputs else []
    return backend.scatter([_bytes(call.outputs[0])], inputs, _options(dist.ScatterOptions, call))


def _all_gather(backend: Any, call: Call, _: int | None) -> Any:
    return backend.allgather([[_bytes(t) for t in call.outputs]], [_bytes(call.inputs[0])])


START: dict[str, Callable[[Any, Call, int | None], Any]] = {
    "all_reduce": _all_reduce,
    "barrier": _barrier,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather": _all_gather,
}
"""Functions that start each supported collective, given the backend, the call and (for a barrier) the GPU's number.

all_to_all is missing, because torch's version needs equal parts or one tensor; our algorithms don't.
"""


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor with a dtype that torch's backends can reduce."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as bytes, for collectives that only move data."""
    return tensor.view(torch.uint8)
