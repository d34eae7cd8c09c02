"""Execution of a call by one of the algorithms of its collective."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from unisono.collectives.algorithms import find
from unisono.collectives.executor import ScratchPool, execute
from unisono.collectives.plan import layout_of, post_copy, pre_copy
from unisono.core.collective import FAMILIES
from unisono.core.reduce_op import combine
from unisono.core.tensors import numels
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
        call: Its tensors are one-dimensional and contiguous. A reduction in place writes to its inputs, too.
        algorithm: Name of an algorithm of this collective.
        segment_bytes: Largest message.
        timeout: Seconds for all of it.
        spare: Memory kept from earlier calls.
    """
    rank, size, root = transport.rank, transport.size, call.root or 0
    chosen = find(call.name, algorithm)
    family = FAMILIES[call.name]
    if family.reduces and family.scatters:
        # Partial sums are kept here.
        scratch = torch.cat(call.inputs)
        call = replace(call, inputs=scratch.split(numels(call.inputs)), packed=scratch)
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
    post_copy(call, rank)
