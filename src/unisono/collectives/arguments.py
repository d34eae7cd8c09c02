"""Turns a caller's arguments into a call, with all checks that a rank can make without communication."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, TypeGuard

import torch

from unisono.core.call import Call
from unisono.core.collective import Collective
from unisono.core.staging import Staging
from unisono.core.tensors import (
    HALVES,
    check_apart,
    check_reducible,
    check_tensor,
    copy_back,
    divide,
    numels,
    parse_op,
)
from unisono.core.types import ReduceOp

__all__ = ["Splits", "check_list", "check_rank", "check_scale", "make_call"]

Splits = tuple[Sequence[int] | None, Sequence[int] | None]
"""Number of rows for each rank in a packed output and a packed input; None for equal parts."""


def make_call(
    what: Collective,
    output: Any,
    input: Any,
    op: object,
    root: int | None,
    *,
    rank: int,
    size: int,
    devices: frozenset[str],
    staging: Staging,
    splits: Splits = (None, None),
    lengths: tuple[int, ...] = (),
    scale: float | None = None,
) -> tuple[Call, torch.Tensor | None]:
    """Return a call, whose remaining fields the engine sets, and a tensor (or None) with its dtype, device and shape.

    Args:
        what: The collective.
        output, input: The caller's arguments; `input` is ignored if the collective works in place.
        op: Reduce operation, for collectives that reduce.
        root: The caller's root; None if there is none.
        rank, size: This rank, and the number of ranks.
        devices: Device types that the transport supports.
        staging: The call's `Staging`, which makes tensors one-dimensional and contiguous.
        splits: See `Splits`.
        lengths: See `Call`.
        scale: Factor for each contribution to an in-place sum.

    Raises:
        TypeError, ValueError: The arguments are invalid.
    """
    if what.root is not None:
        check_rank(root, what.root, size)
    if not what.moves:
        return Call(what.family, op=ReduceOp.BOR, staging=staging), None
    if what.in_place:
        return _in_place(what, output, op, root, rank, size, devices, staging, scale)
    checks = _Checks(what, root or 0, rank, size, devices)
    return _apart(checks, output, input, op, root, splits, lengths, staging)


def _in_place(
    what: Collective,
    output: Any,
    op: object,
    root: int | None,
    rank: int,
    size: int,
    devices: frozenset[str],
    staging: Staging,
    scale: float | None,
) -> tuple[Call, torch.Tensor]:
    """Return the call for an in-place collective."""
    contributes = root is None or what.contributes(rank, root)
    receives = root is None or what.receives(rank, root)
    writes = root is None or what.writes(rank, root)
    label = "the tensor" if what.output == "tensor" else what.output
    tensor = check_tensor(output, label, devices, written=writes)
    reduced = parse_op(op) if what.reduces else None
    if reduced is not None and not receives:
        # Copy, because partial sums must not overwrite the tensor of a rank that receives no result.
        flat = _copied([tensor], staging)
    elif scale is not None:
        check_scale(scale, reduced, tensor.dtype)
        # Scale a copy, because the caller's tensor must not change before all ranks agree.
        flat = _copied([tensor], staging)
        staging.before.append(partial(flat.mul_, scale))
        staging.after.append(partial(copy_back, tensor, flat.view(tensor.shape)))
    else:
        flat = staging.flat(tensor, read=contributes, write=writes)
    outputs = (flat,) if receives else ()
    if reduced is not None:
        check_reducible(reduced, tensor.dtype)
    average = reduced is ReduceOp.AVG
    if average:
        _divide(flat, outputs, size, staging)
    if writes and isinstance(output, list):
        staging.write_back(output, tensor)
    call = Call(
        what.family,
        inputs=(flat,) if contributes else (),
        outputs=outputs,
        op=ReduceOp.SUM if average else reduced,
        average=average,
        root=root,
        staging=staging,
    )
    return call, tensor


def _apart(
    checks: _Checks,
    output: Any,
    input: Any,
    op: object,
    root: int | None,
    splits: Splits,
    lengths: tuple[int, ...],
    staging: Staging,
) -> tuple[Call, torch.Tensor]:
    """Return the call for a collective with separate input and output."""
    what = checks.what
    size = checks.size
    read, written = checks.sides(output, input, splits)
    reduced = parse_op(op) if what.reduces else None
    like = (written if what.scatters and not what.gathers else read if read.tensors else written).tensors[0]
    halves = reduced is ReduceOp.AVG and like.dtype in HALVES
    copies = reduced is not None and (halves or _share_storage(read, written))
    # Make the inputs' flat tensors first, because `BufferGuard` compares its tensors in this order, each before it
    # writes the result to the output, which may overlap the input.
    packed: torch.Tensor | None
    if copies:
        packed = _copied(read.tensors, staging)
        inputs = packed.split(read.counts)
    else:
        inputs, packed = _flat(read, [staging.flat(t, read=True, write=False) for t in read.tensors])
    outputs, whole = _flat(written, [staging.flat(t, read=False, write=True) for t in written.tensors])
    packed = whole if reduced is None else packed
    average = reduced is ReduceOp.AVG
    if reduced is not None:
        check_reducible(reduced, like.dtype)
        if average:
            _divide(packed if packed is not None else inputs[0], outputs, size, staging)
    if written.tensors and what.writes(checks.rank, checks.root):
        _write_back(what, output, written, staging)
    call = Call(
        what.family,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        op=ReduceOp.SUM if average else reduced,
        average=average,
        root=root,
        packed=packed,
        lengths=lengths,
        staging=staging,
    )
    return call, like


def _write_back(what: Collective, output: Any, written: _Side, staging: Staging) -> None:
    results: Any = output if what.gathers and not what.packed else (output,)
    lists = [id(buffer) for buffer in results if isinstance(buffer, list)]
    if len(set(lists)) < len(lists):
        raise ValueError(f"{what.output} has one list several times; pass separate lists")
    for buffer, tensor in zip(results, written.tensors, strict=True):
        if isinstance(buffer, list):
            staging.write_back(buffer, tensor)


def _divide(summed: torch.Tensor, outputs: Sequence[torch.Tensor], size: int, staging: Staging) -> None:
    """Turn a sum into an average. Half-precision inputs are divided before the sum, so that the sum cannot overflow."""
    if summed.dtype in HALVES:
        staging.before.append(partial(divide, summed, size))
    elif outputs:
        staging.after.insert(0, partial(divide, outputs[0], size))


def check_scale(scale: object, op: ReduceOp | None, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError if `scale` is not a valid factor for `op` and `dtype`."""
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"scale must be a number, not {type(scale).__name__}")
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"scale is for sums and averages, not for {None if op is None else op.value!r}")
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"scale needs a floating or complex dtype, not {str(dtype).removeprefix('torch.')}")


def _copied(tensors: Sequence[torch.Tensor], staging: Staging) -> torch.Tensor:
    """Return one writable tensor; `staging` copies the caller's tensors into it when the call begins."""
    lengths = numels(tensors)
    scratch = staging.scratch(sum(lengths), tensors[0])
    for part, tensor in zip(scratch.split(lengths), tensors, strict=True):
        staging.copy_before(part.view(tensor.shape), tensor)
    return scratch


class _Side(NamedTuple):
    """The tensors that a rank reads in a call, or those that it writes.

    Attributes:
        tensors: The caller's tensors: a single tensor, or one tensor per rank.
        counts: Number of elements in each part. A part is a tensor, or a slice of a single tensor that contains all
            parts.
    """

    tensors: tuple[torch.Tensor, ...]
    counts: tuple[int, ...]

    def parts(self) -> list[torch.Tensor]:
        """Return the parts: the tensors themselves, or slices of the single contiguous tensor."""
        if len(self.tensors) == len(self.counts):
            return list(self.tensors)
        return list(self.tensors[0].detach().view(-1).split(self.counts))


def _share_storage(read: _Side, written: _Side) -> bool:
    """Return whether the output may overlap the input, because both have the same storage."""
    target = written.tensors[0].untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == target for tensor in read.tensors)


def _flat(side: _Side, flat: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
    """Return the parts as flat tensors, and the single tensor (or None) that contains all of them."""
    if len(side.tensors) == len(side.counts):
        return flat, None
    return flat[0].split(side.counts), flat[0]


def check_rank(rank: object, name: str, size: int, *, other_than: int | None = None) -> None:
    """Raise TypeError or ValueError unless an argument is a rank below `size` that differs from `other_than`."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{name} must be an int, not {type(rank).__name__}")
    if not 0 <= rank < size:
        raise ValueError(f"{name}={rank} is not a rank of this communicator, whose ranks are 0 to {size - 1}")
    if rank == other_than:
        raise ValueError(f"{name}={rank} is this rank itself; copy the tensor instead")


def _is_list(tensors: object) -> TypeGuard[Sequence[object]]:
    """Return whether an argument is a sequence of buffers rather than a buffer of numbers."""
    return isinstance(tensors, Sequence) and not isinstance(
        tensors, torch.Tensor | str | bytes | bytearray | memoryview | array
    )


def check_list(
    tensors: object, name: str, size: int, devices: frozenset[str], *, written: bool, like: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return one tensor per rank, all with the dtype and device of `like` (of the first tensor if `like` is None)."""
    if not _is_list(tensors):
        raise TypeError(f"{name} must be a list of tensors, not {type(tensors).__name__}")
    if len(tensors) != size:
        raise ValueError(f"{name} must have one tensor for each of the {size} ranks, not {len(tensors)}")
    found: list[torch.Tensor] = []
    for index, tensor in enumerate(tensors):
        found.append(check_tensor(tensor, f"{name}[{index}]", devices, written=written))
        _check_like(found[index], f"{name}[{index}]", found[0] if like is None else like)
    return tuple(found)


class _Checks(NamedTuple):
    """Checks of one call's tensors."""

    what: Collective
    root: int
    rank: int
    size: int
    devices: frozenset[str]

    def sides(self, output: object, input: object, splits: Splits) -> tuple[_Side, _Side]:
        """Return the tensors to read and the tensors to write; raise an error if these tensors do not match."""
        collective = self.what
        if collective.packed:
            read, written = self._packed(output, input, splits)
        elif collective.pairwise:
            read = self._list(input, collective.input, None, written=False)
            written = self._list(output, collective.output, read.tensors[0], written=True)
        elif collective.gathers:
            read = self._one(input, collective.input)
            written = self._list(output, collective.output, read.tensors[0], written=True)
        else:
            written = self._one(output, collective.output, written=True)
            read = self._list(input, collective.input, written.tensors[0], written=False)
        self._check_own(read, written)
        self._check_apart(read, written)
        return read, written

    def _one(self, tensor: object, name: str, *, written: bool = False) -> _Side:
        label = "the tensor" if name == "tensor" else name
        found = check_tensor(tensor, label, self.devices, written=written)
        return _Side((found,), (found.numel(),))

    def _list(self, tensors: object, name: str, like: torch.Tensor | None, *, written: bool) -> _Side:
        """Check a list of one tensor per rank. If there is a root, only the root may pass the list."""
        if self.what.root is not None:
            if self.rank != self.root:
                if tensors is not None and not (_is_list(tensors) and not tensors):
                    raise ValueError(f"{name} is for rank {self.root} only; pass None on the other ranks")
                return _Side((), ())
            if tensors is None:
                raise ValueError(f"{name} must be given on rank {self.root}, one tensor per rank")
        found = check_list(tensors, name, self.size, self.devices, written=written, like=like)
        for index, tensor in enumerate(found):
            if not self.what.uneven and like is not None and tensor.numel() != like.numel():
                raise ValueError(
                    f"{name}[{index}] has {tensor.numel()} elements, but the tensor has {like.numel()}; "
                    "all must have the same number"
                )
        return _Side(found, numels(found))

    def _packed(self, output: object, input: object, splits: Splits) -> tuple[_Side, _Side]:
        collective = self.what
        given = check_tensor(input, collective.input, self.devices, written=False)
        taken = check_tensor(output, collective.output, self.devices, written=True)
        _check_like(taken, collective.output, given)
        if collective.pairwise:
            sent = self._split_rows(given, splits[1], collective.input)
            received = self._split_rows(taken, splits[0], collective.output)
            return _Side((given,), sent), _Side((taken,), received)
        sides = [(taken, collective.output), (given, collective.input)]
        (large, name), (small, other) = reversed(sides) if collective.scatters else sides
        if large.numel() != small.numel() * self.size:
            raise ValueError(
                f"{name} must have {self.size} times the {small.numel()} elements of {other}, not {large.numel()}"
            )
        many = _Side((large,), (small.numel(),) * self.size)
        one = _Side((small,), (small.numel(),))
        return (many, one) if collective.scatters else (one, many)

    def _split_rows(self, tensor: torch.Tensor, sizes: Sequence[int] | None, name: str) -> tuple[int, ...]:
        if tensor.dim() == 0:
            raise ValueError(f"{name} has no dimension to split; it must have at least one")
        rows = tensor.shape[0]
        if sizes is None:
            if rows % self.size:
                raise ValueError(
                    f"{name} has {rows} rows, which is not divisible by {self.size} ranks; pass split sizes"
                )
            sizes = [rows // self.size] * self.size
        if len(sizes) != self.size or min(sizes) < 0 or sum(sizes) != rows:
            raise ValueError(
                f"the split sizes of {name} must be {self.size} numbers that sum to its {rows} rows, not {list(sizes)}"
            )
        row = tensor.shape[1:].numel()
        return tuple(size * row for size in sizes)

    def _check_own(self, read: _Side, written: _Side) -> None:
        """Raise an error if this rank sends itself more or fewer elements than it expects from itself."""
        if not read.counts or not written.counts:
            return
        given = read.counts[self.rank if self.what.scatters else 0]
        taken = written.counts[self.rank if self.what.gathers else 0]
        if given == taken:
            return
        if self.what.pairwise:
            raise ValueError(f"this rank sends itself {given} elements but expects {taken}")
        listed, single = (self.what.input, self.what.output) if self.what.scatters else (self.what.output, "tensor")
        counts = (given, taken) if self.what.scatters else (taken, given)
        raise ValueError(
            f"{listed}[{self.rank}] belongs to this rank, whose {single} has {counts[1]} elements, not {counts[0]}"
        )

    def _check_apart(self, read: _Side, written: _Side) -> None:
        """Raise an error if outputs overlap each other or the input, except for exactly this rank's own part."""
        collective = self.what
        if collective.reduces or any(
            collective.packed and not t.is_contiguous() for t in (*read.tensors, *written.tensors)
        ):
            # Overlaps do no harm, because the inputs of reductions, and of packed collectives on non-contiguous
            # tensors, are copied before the collective starts.
            return
        sources = _labelled(read.parts(), collective.input, collective.scatters, "the input")
        targets = _labelled(written.parts(), collective.output, collective.gathers, "the tensor")
        check_apart(targets)
        if not collective.pairwise and sources and targets:
            own_source = self.rank if collective.scatters else 0
            own_target = self.rank if collective.gathers else 0
            if sources[own_source][1].data_ptr() == targets[own_target][1].data_ptr():
                if collective.gathers:
                    del targets[own_target]
                else:
                    del sources[own_source]
        check_apart(targets, sources)


def _labelled(tensors: Sequence[torch.Tensor], name: str, many: bool, single: str) -> list[tuple[str, torch.Tensor]]:
    """Return each tensor with its name for error messages, as pairs of name and tensor."""
    return [(f"{name}[{index}]" if many else single, tensor) for index, tensor in enumerate(tensors)]


def _check_like(tensor: torch.Tensor, name: str, like: torch.Tensor) -> None:
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}, but the other tensor of the call is {like.dtype} "
            f"on {like.device}; they must be alike"
        )
