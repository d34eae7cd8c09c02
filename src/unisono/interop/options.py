"""Translation of torch's options: operations, timeouts, blocking or asynchronous."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

__all__ = ["GroupOptions", "asynchronous", "limit_s", "only", "operation", "plain"]

_NAMES: dict[object, str] = {op: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Wishes for one group, given as `pg_options` to `init_process_group` or `new_group`; equal on all ranks.

    Attributes:
        transport: What carries the group: "shm", "gloo", or "auto" for shared memory where all its ranks
            are on one host, else gloo.
        check: As for `unisono.init`.
        chunk_bytes: As for `unisono.init`.

    Example:
        >>> GroupOptions(transport="gloo").check
        'auto'
    """

    transport: str = "auto"
    check: Literal["auto", "full", "off"] = "auto"
    chunk_bytes: int = 2 << 20


def operation(options: Any) -> str:
    """The name of the reduce operation in an options object of torch's, or in a `dist.ReduceOp`; sum by default.

    Raises `ValueError` for PREMUL_SUM, which is NCCL's own.

    Example:
        >>> operation(torch.distributed.ReduceOp.MAX)
        'max'
    """
    op = getattr(options, "reduceOp", options)
    if op is None:
        return "sum"
    name = _NAMES[getattr(op, "op", op)]
    if name == "premul_sum":
        raise ValueError("backend 'unisono' has no PREMUL_SUM; multiply the tensor yourself, and use SUM")
    return name


def limit_s(options: Any) -> float | None:
    """Return the timeout of a call in seconds, if its options set one; None for the group's own timeout."""
    timeout = options if isinstance(options, timedelta) else getattr(options, "timeout", None)
    # Torch writes "not set" as a negative time.
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


def asynchronous(options: Any) -> bool:
    """Return whether a call may return before it is done: True, as torch's C++ code expects, unless disabled."""
    return bool(getattr(options, "asyncOp", True))


def only(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """The only tensor of a list; several on one rank were for several devices of one process."""
    if len(tensors) != 1:
        raise ValueError(f"{name} takes one tensor per rank, not {len(tensors)}")
    return plain(tensors[0])


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a gradient history, which torch's own backends ignore.

    Not only for what has one now: torch may give the tensor one before a later call is done, as its functions with
    a derivative do with their outputs. A sparse tensor is itself, for the other one would not be changed with it.
    """
    return tensor.detach() if tensor.layout == torch.strided else tensor
