"""Describes calls on torch's process groups, so that they can be compared between ranks and shown in reports."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unisono.core.call import Fingerprint, hash_of
from unisono.core.flight_recorder import Place
from unisono.interop.dispatched_calls import Operator

__all__ = ["OPERATIONS", "Form", "Signature", "form_of", "signature_of", "unseen"]

_NAMES = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce_coalesced", "tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "allgather_": ("all_gather", "input_tensors"),
    "_allgather_base_": ("all_gather_into_tensor", "input_tensor"),
    "allgather_coalesced_": ("all_gather_coalesced", "input_list"),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", "inputs"),
    "reduce_scatter_": ("reduce_scatter", "output_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "outputs"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all_single", "input"),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("monitored_barrier", None),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
}
"""For each operator, its name in `torch.distributed` and the argument whose length must be equal on all ranks."""
_UNEVEN = ("all_to_all", "all_to_all_single")
_LISTS = {"all_gather": "output_tensors", "reduce_scatter": "input_tensors"}
"""Arguments that are lists of one tensor per rank. NCCL accepts tensors of different lengths in these lists."""
_OPS = {op: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}
OPERATIONS = tuple(sorted({*_OPS.values()}))


@cache
def form_of(operator: Operator) -> Form | None:
    """Return the `Form` of an operator's calls, or None if the calls of this operator are not watched."""
    return Form(operator) if operator.name in _NAMES else None


class Form:
    """Defines which arguments of an operator's calls are compared between ranks.

    Attributes:
        operation: Name in `torch.distributed`.
    """

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        operation, tensors = _NAMES[operator.name]
        self.operation: str = operation
        names = ["output_tensors", "output", "output_split_sizes", "input_split_sizes"]
        if operation not in _UNEVEN:
            names = [_LISTS.get(operation, "")]
        self._tensors = operator.places.get(tensors or "")
        self._root = operator.places.get("root_rank")
        self._more = [operator.places[name] for name in names if name in operator.places]

    def waits(self, args: tuple[Any, ...]) -> bool:
        """Return whether the caller waits for the result immediately."""
        return self.operation == "monitored_barrier" or not self._operator.asynchronous(args)

    def timeout_s(self, args: tuple[Any, ...]) -> float | None:
        """Return the call's own timeout in seconds, or None if the group's timeout applies."""
        timeout_ms = self._operator.value(args, "timeout", -1)
        return None if timeout_ms < 0 else timeout_ms / 1000

    def message(self, args: tuple[Any, ...]) -> tuple[int | None, int] | None:
        """Return a message's peer (None: any rank of the group) and tag; None for a collective."""
        tag = self._operator.value(args, "tag")
        return None if tag is None else (self._operator.value(args, "dst", self._operator.value(args, "src")), tag)

    def op(self, args: tuple[Any, ...]) -> str | None:
        """Return the reduce operation's name, or None if the call has none or this version of torch hides it."""
        kind = self._operator.kind(args)
        # `kind.name` takes 2 us.
        return None if kind is None else _OPS[kind]

    def key(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return everything that a call's signature depends on."""
        return (
            self.operation,
            () if self._tensors is None else _layout(args[self._tensors]),
            None if self._root is None else args[self._root],
            *(_layout(args[place]) for place in self._more),
        )


class Signature(NamedTuple):
    """The values of a call that are compared between ranks and shown in reports.

    Attributes:
        same: Hash of the values that must be equal on all ranks, except the reduce operation.
        fingerprint: Fingerprint of the call, with all values; its call number is always 0.
    """

    same: int
    fingerprint: Fingerprint


def signature_of(form: Form, args: tuple[Any, ...], op: str | None, place: Place, size: int) -> Signature:
    """Return the signature of a call on a group of `size` ranks."""
    _, layout, root, *more = form.key(args)
    tensors = _flat(layout)
    counts = tuple(shape.numel() for shape, _, _ in tensors)
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    if form.operation in _LISTS and len({shape for shape, _, _ in _flat(more[0])}) > 1:
        counts = ()
    elif form.operation in _UNEVEN:
        sends = _parts(tensors, more[2] if len(more) > 1 else (), size)
        receives = _parts(_flat(more[0]), more[1] if len(more) > 1 else (), size)
        counts = ()
    fingerprint = Fingerprint(
        0,
        form.operation,
        op,
        root,
        " + ".join(sorted({str(dtype) for _, dtype, _ in tensors})) or None,
        counts,
        " + ".join(sorted({device for _, _, device in tensors})) or None,
        sends=sends,
        receives=receives,
        shape=tuple(tensors[0][0]) if len(tensors) == 1 else None,
        site=place,
    )
    # Leave the reduce operation out of the hash: torch may hide it, and a call whose operation is hidden must match a
    # call with any operation.
    return Signature(hash_of(fingerprint._replace(op=None).compared()), fingerprint)


def _layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.device.type)
    return tuple([_layout(each) for each in value]) if isinstance(value, list) else value


def _flat(layout: Any) -> list[tuple[torch.Size, torch.dtype, str]]:
    if layout and isinstance(layout[0], torch.Size):
        return [layout]
    return [each for part in layout for each in _flat(part)]


def _parts(tensors: list[tuple[torch.Size, torch.dtype, str]], splits: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the number of elements sent to or received from each rank."""
    if len(tensors) != 1 or size == 1:
        return tuple(shape.numel() for shape, _, _ in tensors)
    shape = tensors[0][0]
    row = shape[1:].numel() if shape else 1
    rows = splits or (shape[0] // size,) * size if shape else ()
    return tuple(row * each for each in rows)


def unseen() -> list[str]:
    """Return the known operators that the installed torch lacks.

    If torch has renamed an operator, calls of the renamed operator are not watched.
    """
    return [name for name in _NAMES if not hasattr(torch.ops.c10d, name)]
