"""Intercepts all calls on torch's C++ process groups, in torch's dispatcher.

All callers of a group, such as `dist.all_reduce`, DDP's reducer in C++ or a functional collective, call an operator
such as `c10d::allreduce_`. Our kernel for the key `BackendSelect`, which is above the kernels of all devices and below
autograd, modes and FakeTensor, gets each call with all its arguments, and passes it on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unisono.core.call import Fingerprint, hash_of
from unisono.core.flight_recorder import Place
from unisono.interop.options import operation

__all__ = ["OPERATIONS", "Form", "Signature", "install", "result_of", "signature_of", "unseen"]

_Seen = Callable[["Form", Any, Callable[[], Any], tuple[Any, ...], str | None], Any]

_KEY = torch._C.DispatchKey.BackendSelect
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
"""By operator: the name in `torch.distributed`, and the argument whose length must be equal on all ranks."""
_UNEVEN = ("all_to_all", "all_to_all_single")
_LISTS = {"all_gather": "output_tensors", "reduce_scatter": "input_tensors"}
"""Arguments with a tensor for each rank, whose lengths may differ under NCCL."""
_METHODS = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip
OPERATIONS = tuple(sorted({name.lower() for name in dist.ReduceOp.RedOpType.__members__}))


class Form:
    """Positions of one operator's arguments; torch's versions differ in some of the last ones.

    Attributes:
        operation: Name in `torch.distributed`.
        group: Position of the process group among the arguments.
    """

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        operation, self._tensor_name = _NAMES[operator._schema.name.partition("::")[2]]
        self.operation: str = operation
        self._arguments = operator._schema.arguments
        self._places = {argument.name: place for place, argument in enumerate(self._arguments)}
        self.group: int = self._places["process_group"]
        self._reduces = "reduce_op" in self._places
        self._tensors = self._places.get(self._tensor_name)
        self._root = self._places.get("root_rank")
        self._async = self._places.get("async_op")
        self._timeout = self._places.get("timeout")
        self._tag = self._places.get("tag")
        self._peer = self._places.get("dst", self._places.get("src"))
        more = [self._places.get(_LISTS.get(self.operation))]
        if self.operation in _UNEVEN:
            names = ("output_tensors", "output", "output_split_sizes", "input_split_sizes")
            more += [self._places.get(name) for name in names]
        self._more = [place for place in more if place is not None]

    def waits(self, args: tuple[Any, ...]) -> bool:
        """Return whether the caller waits for the result immediately. Trailing defaults are not passed."""
        if self._async is None:
            return self.operation == "monitored_barrier"
        return len(args) > self._async and not args[self._async]

    def timeout_s(self, args: tuple[Any, ...]) -> float | None:
        """Return the call's own timeout in seconds; None if the group's applies."""
        timeout_ms = args[self._timeout] if self._timeout is not None and len(args) > self._timeout else -1
        return None if timeout_ms < 0 else timeout_ms / 1000

    def message(self, args: tuple[Any, ...], members: Sequence[int]) -> str | None:
        """Return what a message is, for reports; None if this is a collective. `members` are the group's ranks."""
        if self._tag is None:
            return None
        way = "to" if self.operation == "send" else "from"
        peer = "any rank" if self._peer is None else f"rank {members[args[self._peer]]}"
        return f"{way} {peer}, tag {args[self._tag]}"

    def key(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return everything that a call's signature depends on."""
        return (
            self.operation,
            () if self._tensors is None else _layout(args[self._tensors]),
            None if self._root is None else args[self._root],
            *(_layout(args[place]) for place in self._more),
        )


class Signature(NamedTuple):
    """A call's values for comparison between ranks and for reports.

    Attributes:
        same: Hash of the values that must be equal.
        fingerprint: All values, with call number 0.
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
    # An unknown reduce operation (from a C++ caller) matches any other.
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
    """Return the number of elements for or from each rank."""
    if len(tensors) != 1 or size == 1:
        return tuple(shape.numel() for shape, _, _ in tensors)
    shape = tensors[0][0]
    row = shape[1:].numel() if shape else 1
    rows = splits or (shape[0] // size,) * size if shape else ()
    return tuple(row * each for each in rows)


class _Op(threading.local):
    """The reduce operation of this thread's call from Python, which the dispatcher does not expose."""

    name: str | None = None


_op = _Op()


def install(seen: _Seen) -> None:
    """Pass all later calls to a function. Call once in each process.

    Args:
        seen: Function of the operator's form, the group, a function that makes the call, its arguments, and the name of
            its reduce operation (None unless called from Python). Returns the call's result.
    """
    library = torch.library.Library("c10d", "IMPL")
    for name in _NAMES:
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            library.impl(name, _kernel(Form(packet.default), seen), "BackendSelect", with_keyset=True)
    # Kept, because the registration ends when the library object is collected.
    _libraries.append(library)
    for name in _METHODS:
        if method := getattr(dist.ProcessGroup, name, None):
            setattr(dist.ProcessGroup, name, _noting_op(method))


_libraries: list[torch.library.Library] = []


def unseen() -> list[str]:
    """Return the operators that this version of torch lacks, whose calls, if any, go unseen."""
    return [name for name in _NAMES if not hasattr(torch.ops.c10d, name)]


def _kernel(form: Form, seen: _Seen) -> Callable[..., Any]:
    unbox = dist.ProcessGroup.unbox
    redispatch = form.operator.redispatch

    def kernel(keyset: Any, *args: Any) -> Any:
        return seen(form, unbox(args[form.group]), lambda: redispatch(keyset.remove(_KEY), *args), args, _op.name)

    return kernel


def _noting_op(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def noted(*args: Any, **keywords: Any) -> Any:
        # Torch's own functions pass their options last.
        options: Any = args[-1] if args else None
        if not hasattr(options, "reduceOp"):
            given = (*args, *keywords.values())
            options = next((each for each in given if hasattr(each, "reduceOp") or isinstance(each, _OPS)), None)
        _op.name = operation(options)
        try:
            return method(*args, **keywords)
        finally:
            _op.name = None

    return noted


_OPS = (dist.ReduceOp, dist.ReduceOp.RedOpType)


def result_of(made: Any) -> dist.Work | None:
    """Return the work among an operator's results."""
    boxed = made[-1] if isinstance(made, tuple) else made
    return dist.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None
