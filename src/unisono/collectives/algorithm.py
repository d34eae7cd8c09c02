"""Execution of a call by one of the algorithms of its collective."""

from __future__ import annotations

from functools import partial

from unisono.collectives.algorithms import find
from unisono.collectives.executor import ScratchPool, execute
from unisono.collectives.plan import layout_of, pre_copy
from unisono.core.reduce_op import combine
from unisono.core.transport import Transport
from unisono.core.types import CollectiveCall, ReduceOp

__all__ = ["run_algorithm"]


def run_algorithm(
    transport: Transport,
    call: CollectiveCall,
    algorithm: str,
    *,
    segment_bytes: int,
    timeout: float,
    spare: ScratchPool,
) -> None:
    """Return when this rank's part of a call is done.

    Args:
        transport: Carries the messages.
        call: Its tensors are one-dimensional and contiguous. A reduction in place writes to them.
        algorithm: Name of an algorithm of this collective.
        segment_bytes: Largest message.
        timeout: Seconds for all of it.
        spare: Memory kept from earlier calls.
    """
    rank, size, root = transport.rank, transport.size, call.root or 0
    chosen = find(call.name, algorithm)
    pre_copy(call, rank)
    execute(
        transport,
        chosen.steps((rank - root) % size, size),
        layout_of(call, chosen.chunks(size), rank, size),
        partial(combine, call.op or ReduceOp.SUM),
        segment_bytes=segment_bytes,
        timeout=timeout,
        root=root,
        spare=spare,
    )
