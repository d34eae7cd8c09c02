"""What one collective call is going to do, put down before anything is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from unisono.layout import Flat, Layout, Pieces
from unisono.reduction import HALVES, check_reducible, divide
from unisono.tensors import Staging
from unisono.types import Call, ReduceOp

__all__ = [
    "Plan",
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


@dataclass(slots=True)
class Plan:
    """A call and how a schedule would lay it out.

    Attributes:
        call: What passes the door.
        layout: From a number of chunks, where a schedule finds them.
        staging: What to do before and after.
        placing: Copies that a schedule takes for done (a rank's message to itself).
        collecting: Copies from where a schedule leaves its result.
        example: A tensor of the call's dtype, device and shape, for the fingerprint.
        counts: Elements that all ranks must agree on.
        nbytes: Of the whole message.
        sends, receives: Elements by rank, where they differ.
    """

    call: Call
    layout: Callable[[int], Layout]
    staging: Staging
    nbytes: int
    example: torch.Tensor | None = None
    counts: tuple[int, ...] = ()
    placing: list[Callable[[], object]] = field(default_factory=list)
    collecting: list[Callable[[], object]] = field(default_factory=list)
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


def all_reduce(staging: Staging, tensor: torch.Tensor, op: ReduceOp, size: int) -> Plan:
    buffer = staging.target(tensor, read=True)
    summed = _averaged(staging, op, buffer, buffer, size)
    call = Call(name="all_reduce", inputs=(buffer,), outputs=(buffer,), op=summed, average=op is ReduceOp.AVG)
    return _in_place(call, buffer, tensor, staging)


def reduce(staging: Staging, tensor: torch.Tensor, op: ReduceOp, root: int, rank: int, size: int) -> Plan:
    if rank == root:
        buffer = staging.target(tensor, read=True)
    else:
        # What passes through must not change the tensor of a rank that gets no result.
        buffer = staging.scratch(tensor.numel(), tensor)
        staging.watch(tensor)
        staging.before.append(lambda: buffer.view(tensor.shape).copy_(tensor.detach()))
    summed = _averaged(staging, op, buffer, buffer, size, result_here=rank == root)
    call = Call(
        name="reduce",
        inputs=(buffer,),
        outputs=(buffer,) if rank == root else (),
        op=summed,
        average=op is ReduceOp.AVG,
        root=root,
    )
    return _in_place(call, buffer, tensor, staging)


def broadcast(staging: Staging, tensor: torch.Tensor, root: int, rank: int) -> Plan:
    buffer = staging.source(tensor) if rank == root else staging.target(tensor)
    call = Call(name="broadcast", inputs=(buffer,) if rank == root else (), outputs=(buffer,), root=root)
    return _in_place(call, buffer, tensor, staging)


def _in_place(call: Call, buffer: torch.Tensor, tensor: torch.Tensor, staging: Staging) -> Plan:
    return Plan(
        call, lambda chunks: Flat.even(buffer, chunks), staging, buffer.nbytes, tensor, counts=(buffer.numel(),)
    )


def gather(
    staging: Staging, tensor: torch.Tensor, outputs: Sequence[torch.Tensor], root: int, rank: int, size: int
) -> Plan:
    source = staging.source(tensor)
    targets = tuple(staging.target(t) for t in outputs)
    call = Call(name="gather", inputs=(source,), outputs=targets, root=root)
    own = {(r - root) % size: t for r, t in enumerate(targets)} or {(rank - root) % size: source}
    plan = Plan(
        call, lambda _: Pieces(dict(own), source), staging, source.nbytes * size, tensor, counts=(source.numel(),)
    )
    if targets:
        plan.placing.append(lambda: _place(targets[rank], source))
    return plan


def scatter(
    staging: Staging, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, rank: int, size: int
) -> Plan:
    target = staging.target(tensor)
    sources = tuple(staging.source(t) for t in inputs)
    call = Call(name="scatter", inputs=sources, outputs=(target,), root=root)
    own = {(r - root) % size: t for r, t in enumerate(sources)} or {(rank - root) % size: target}
    plan = Plan(
        call, lambda _: Pieces(dict(own), target), staging, target.nbytes * size, tensor, counts=(target.numel(),)
    )
    if sources:
        plan.placing.append(lambda: _place(target, sources[rank]))
    return plan


def all_gather(staging: Staging, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, rank: int) -> Plan:
    return _all_gather(staging, [staging.target(t) for t in outputs], tensor, rank)


def all_gather_single(staging: Staging, output: torch.Tensor, tensor: torch.Tensor, rank: int, size: int) -> Plan:
    whole = staging.target(output)
    return _all_gather(staging, whole.split([tensor.numel()] * size), tensor, rank, whole)


def _all_gather(
    staging: Staging,
    targets: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    rank: int,
    whole: torch.Tensor | None = None,
) -> Plan:
    source = staging.source(tensor)
    counts = tuple(t.numel() for t in targets)
    call = Call(name="all_gather", inputs=(source,), outputs=tuple(targets), whole=whole)
    nbytes = sum(t.nbytes for t in targets)
    plan = Plan(call, lambda _: Pieces(dict(enumerate(targets))), staging, nbytes, tensor, counts)
    plan.placing.append(lambda: _place(targets[rank], source))
    return plan


def reduce_scatter(
    staging: Staging, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, rank: int, size: int
) -> Plan:
    target = staging.target(tensor)
    counts = tuple(t.numel() for t in inputs)
    # One copy, in which sums grow: the inputs belong to the caller.
    scratch = staging.scratch(sum(counts), tensor)
    parts = scratch.split(list(counts))
    for part, given in zip(parts, inputs, strict=True):
        staging.watch(given)
        staging.before.append(partial(part.view(given.shape).copy_, given.detach()))
    summed = _averaged(staging, op, scratch, target, size)
    call = Call(
        name="reduce_scatter",
        inputs=tuple(parts),
        outputs=(target,),
        op=summed,
        average=op is ReduceOp.AVG,
        whole=scratch,
    )

    plan = Plan(call, lambda _: Flat.sized(scratch, counts), staging, scratch.nbytes, tensor, counts)
    plan.collecting.append(lambda: target.copy_(parts[rank]))
    return plan


def all_to_all(
    staging: Staging, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], rank: int, size: int
) -> Plan:
    sources = [staging.source(t) for t in inputs]
    targets = [staging.target(t) for t in outputs]
    call = Call(name="all_to_all", inputs=tuple(sources), outputs=tuple(targets))
    plan = Plan(
        call,
        lambda _: Pieces(dict(enumerate([*sources, *targets]))),
        staging,
        sum(t.nbytes for t in sources),
        inputs[0],
        sends=tuple(t.numel() for t in sources),
        receives=tuple(t.numel() for t in targets),
    )
    plan.placing.append(lambda: _place(targets[rank], sources[rank]))
    return plan


def barrier() -> Plan:
    token = torch.ones(1, dtype=torch.uint8, device="cpu")
    return Plan(Call(name="barrier", op=ReduceOp.BOR), lambda _: Flat.even(token, 1), Staging(), 0)


def _place(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _averaged(
    staging: Staging, op: ReduceOp, summed: torch.Tensor, result: torch.Tensor, size: int, *, result_here: bool = True
) -> ReduceOp:
    """The operation that transports see: an average is a sum and a division."""
    check_reducible(op, summed.dtype)
    if op is not ReduceOp.AVG:
        return op
    if summed.dtype in HALVES:
        staging.before.append(lambda: divide(summed, size))
    elif result_here:
        staging.after.insert(0, lambda: divide(result, size))
    return ReduceOp.SUM
