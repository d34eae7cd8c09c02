"""Plan of one call: its tensors as one-dimensional memory, and the layout of an algorithm's chunks there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.collectives.arguments import Side
from unisono.collectives.chunk_layout import Flat, Layout, PartialSums, Pieces
from unisono.core.collective import FAMILIES, Collective
from unisono.core.reduce_op import HALVES, check_reducible, divide
from unisono.core.staging import Staging
from unisono.core.tensors import numels
from unisono.core.types import CollectiveCall, ReduceOp

__all__ = ["Plan", "layout_of", "make_plan", "message_bytes", "pre_copy"]


@dataclass(slots=True)
class Plan:
    """Call as passed to the transport, and the copies before and after it.

    Attributes:
        collective: Its description.
        call: What a transport or an algorithm carries out.
        staging: Copies before and after.
        like: A tensor of the call's dtype, device and shape; None if there is none.
        origin: In a backward pass, the number and the line of the call whose gradients this one moves.
    """

    collective: Collective
    call: CollectiveCall
    staging: Staging
    like: torch.Tensor | None = None
    origin: tuple[int, str] | None = None

    def ordered(self) -> Plan:
        """Let its work on accelerators follow what this thread has queued there. For another thread to execute it."""
        self.staging.order.follow((*self.call.inputs, *self.call.outputs))
        return self


def make_plan(
    collective: Collective,
    read: Side,
    written: Side,
    op: ReduceOp | None,
    root: int | None,
    size: int,
    staging: Staging,
    lengths: tuple[int, ...] = (),
) -> Plan:
    """Return the plan of a call with checked arguments.

    Args:
        collective: The collective.
        read, written: As of `check_arguments`.
        op: For collectives that reduce.
        root: For collectives that have one.
        size: Number of ranks.
        staging: Makes one-dimensional contiguous tensors of others.
        lengths: As of `CollectiveCall`.
    """
    if not collective.moves:
        return Plan(collective, CollectiveCall(name=collective.family, op=ReduceOp.BOR), staging)
    like = (written if collective.scatters and not collective.gathers else read if read.tensors else written).tensors[0]
    reduces = None if op is None else ReduceOp.SUM if op is ReduceOp.AVG else op
    packed: torch.Tensor | None = None
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    if collective.in_place:
        buffer = _in_place(collective, read, written, staging)
        inputs, outputs = (buffer,) if read.tensors else (), (buffer,) if written.tensors else ()
    elif collective.reduces:
        outputs = (staging.target(written.tensors[0]),)
        if (op is ReduceOp.AVG and like.dtype in HALVES) or _share_storage(read, written):
            packed = _copied(read, like, staging)
            inputs = packed.split(read.counts)
        else:
            inputs, packed = _flat(read, [staging.source(t) for t in read.tensors])
    else:
        inputs, _ = _flat(read, [staging.source(t) for t in read.tensors])
        outputs, packed = _flat(written, [staging.target(t) for t in written.tensors])
    if op is not None:
        check_reducible(op, like.dtype)
        if op is ReduceOp.AVG:
            _average((packed if packed is not None else inputs[0]), outputs, size, staging)
    call = CollectiveCall(
        name=collective.family,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        op=reduces,
        average=op is ReduceOp.AVG,
        root=root,
        packed=packed,
        lengths=lengths,
    )
    return Plan(collective, call, staging, like)


def _in_place(collective: Collective, read: Side, written: Side, staging: Staging) -> torch.Tensor:
    tensor = (read.tensors or written.tensors)[0]
    if collective.reduces and not written.tensors:
        # Intermediate data must not change the tensor of a rank that receives no result.
        return _copied(read, tensor, staging)
    if collective.reduces or not read.tensors:
        return staging.target(tensor, read=bool(read.tensors))
    return staging.source(tensor)


def _copied(read: Side, like: torch.Tensor, staging: Staging) -> torch.Tensor:
    """Return one copy of all input, which may be written to: the tensors belong to the caller."""
    scratch = staging.scratch(sum(read.counts), like)
    lengths = numels(read.tensors)
    for part, tensor in zip(scratch.split(lengths), read.tensors, strict=True):
        staging.copy_before(part.view(tensor.shape), tensor)
    return scratch


def _share_storage(read: Side, written: Side) -> bool:
    """Return whether a result may overlap the input."""
    target = written.tensors[0].untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == target for tensor in read.tensors)


def _flat(side: Side, flat: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
    """The parts as one-dimensional tensors, and the tensor that they are consecutive slices of, if there is one."""
    if len(side.tensors) == len(side.counts):
        return flat, None
    return flat[0].split(side.counts), flat[0]


def _average(summed: torch.Tensor, outputs: Sequence[torch.Tensor], size: int, staging: Staging) -> None:
    """Reduce an average to a sum for the transport: half-precision inputs are divided before, to avoid overflow."""
    if summed.dtype in HALVES:
        staging.before.append(lambda: divide(summed, size))
    elif outputs:
        staging.after.insert(0, lambda: divide(outputs[0], size))


def message_bytes(call: CollectiveCall, size: int) -> int:
    """Return the bytes of the whole message: the same on every rank, unless pairs of ranks have their own lengths."""
    family = FAMILIES[call.name]
    if call.lengths:
        return sum(call.lengths) * (call.inputs or call.outputs)[0].itemsize
    if family.root is not None and not family.in_place:
        return size * (call.outputs if family.scatters else call.inputs)[0].nbytes
    many = call.inputs if family.scatters or not family.gathers else call.outputs
    return sum(t.nbytes for t in (many or call.outputs))


def layout_of(call: CollectiveCall, chunks: int, rank: int, size: int) -> Layout:
    """Return the layout of an algorithm's chunks in the tensors of a call."""
    family, root = FAMILIES[call.name], call.root or 0
    if not family.moves:
        return Flat.even(torch.ones(1, dtype=torch.uint8, device="cpu"), chunks)
    if family.in_place:
        return Flat.even((call.inputs or call.outputs)[0], chunks)
    if family.reduces:
        return PartialSums(call.inputs, rank, call.outputs[0])
    if family.pairwise:
        return Pieces(dict(enumerate((*call.inputs, *call.outputs))), call.inputs[0])
    many, one = (call.outputs, call.inputs) if family.gathers else (call.inputs, call.outputs)
    here = {(r - root) % size: tensor for r, tensor in enumerate(many)} or {(rank - root) % size: one[0]}
    return Pieces(here, one[0], call.lengths[root:] + call.lengths[:root])


def pre_copy(call: CollectiveCall, rank: int) -> None:
    """Copy a rank's part for itself; algorithms assume that this is done."""
    family = FAMILIES[call.name]
    if family.in_place or not (call.inputs and call.outputs) or (family.reduces and len(call.inputs) > 1):
        return
    source = call.inputs[rank if family.scatters else 0]
    target = call.outputs[rank if family.gathers else 0]
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
