"""Checks of a collective's arguments that one rank can make alone, before anything is sent."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch

from unisono.core.collective import Collective
from unisono.core.tensors import check_apart, check_tensor, numels

__all__ = ["NO_TENSORS", "Side", "Splits", "check_arguments", "check_list", "check_rank"]


class Side(NamedTuple):
    """Tensors that one rank reads or writes in a call.

    Attributes:
        tensors: The caller's tensors: one, or one for each rank.
        counts: Elements of each part: of each tensor, or of each slice of the one tensor that holds them all.
    """

    tensors: tuple[torch.Tensor, ...]
    counts: tuple[int, ...]

    def parts(self) -> list[torch.Tensor]:
        """The parts of contiguous memory, or the tensors themselves."""
        if len(self.tensors) == len(self.counts):
            return list(self.tensors)
        return list(self.tensors[0].detach().view(-1).split(self.counts))


NO_TENSORS = Side((), ())

Splits = tuple[Sequence[int] | None, Sequence[int] | None]


def check_arguments(
    collective: Collective,
    output: object,
    input: object,
    root: object,
    splits: Splits,
    rank: int,
    size: int,
    devices: frozenset[str],
) -> tuple[Side, Side]:
    """Return the sides that this rank reads and writes; raise for arguments that do not match.

    Args:
        collective: The collective.
        output, input: The caller's arguments; `input` is ignored where the collective works in place.
        root: The caller's root; None if there is none.
        splits: Rows of a packed output and input for each rank, or None for equal parts.
        rank, size: This rank, and the number of ranks.
        devices: Device types that the transport supports.
    """
    if collective.root is not None:
        check_rank(root, collective.root, size)
    if not collective.moves:
        return NO_TENSORS, NO_TENSORS
    return _Checks(collective, root if isinstance(root, int) else 0, rank, size, devices).sides(output, input, splits)


def check_rank(rank: object, name: str, size: int, *, other_than: int | None = None) -> None:
    """Raise `TypeError` or `ValueError` if an argument is not a rank of this size, or is an excluded rank."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{name} must be an int, not {type(rank).__name__}")
    if not 0 <= rank < size:
        raise ValueError(f"{name}={rank} is not a rank of this communicator, whose ranks are 0 to {size - 1}")
    if rank == other_than:
        raise ValueError(f"{name}={rank} is this rank itself; copy the tensor instead")


def _is_list(tensors: object) -> TypeGuard[Sequence[object]]:
    """Return whether an argument is a sequence of buffers, not a buffer of numbers."""
    return isinstance(tensors, Sequence) and not isinstance(
        tensors, torch.Tensor | str | bytes | bytearray | memoryview | array
    )


def check_list(
    tensors: object, name: str, size: int, devices: frozenset[str], *, written: bool, like: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return one tensor for each rank, all of the dtype and device of `like`, or of the first one if it is None."""
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
    """The checks of one call."""

    collective: Collective
    root: int
    rank: int
    size: int
    devices: frozenset[str]

    def sides(self, output: object, input: object, splits: Splits) -> tuple[Side, Side]:
        collective = self.collective
        if collective.in_place:
            contributes, receives = (
                collective.contributes(self.rank, self.root),
                collective.receives(self.rank, self.root),
            )
            side = self._one(output, collective.output, written=collective.writes(self.rank, self.root))
            return side if contributes else NO_TENSORS, side if receives else NO_TENSORS
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

    def _one(self, tensor: object, name: str, *, written: bool = False) -> Side:
        label = "the tensor" if name == "tensor" else name
        found = check_tensor(tensor, label, self.devices, written=written)
        return Side((found,), (found.numel(),))

    def _list(self, tensors: object, name: str, like: torch.Tensor | None, *, written: bool) -> Side:
        """Return one tensor for each rank, as `check_list`; only the root passes them if there is one."""
        if self.collective.root is not None:
            if self.rank != self.root:
                if tensors is not None and not (_is_list(tensors) and not tensors):
                    raise ValueError(f"{name} is for rank {self.root} only; pass None on the other ranks")
                return NO_TENSORS
            if tensors is None:
                raise ValueError(f"{name} must be given on rank {self.root}, one tensor per rank")
        found = check_list(tensors, name, self.size, self.devices, written=written, like=like)
        for index, tensor in enumerate(found):
            if not self.collective.uneven and like is not None and tensor.numel() != like.numel():
                raise ValueError(
                    f"{name}[{index}] has {tensor.numel()} elements, but the tensor has {like.numel()}; "
                    "all must have the same number"
                )
        return Side(found, numels(found))

    def _packed(self, output: object, input: object, splits: Splits) -> tuple[Side, Side]:
        collective = self.collective
        given = check_tensor(input, collective.input, self.devices, written=False)
        taken = check_tensor(output, collective.output, self.devices, written=True)
        _check_like(taken, collective.output, given)
        if collective.pairwise:
            rows = (
                self._split_rows(given, splits[1], collective.input),
                self._split_rows(taken, splits[0], collective.output),
            )
            return Side((given,), rows[0]), Side((taken,), rows[1])
        (large, name), (small, other) = (taken, collective.output), (given, collective.input)
        if collective.scatters:
            (large, name), (small, other) = (small, other), (large, name)
        if large.numel() != small.numel() * self.size:
            raise ValueError(
                f"{name} must have {self.size} times the {small.numel()} elements of {other}, not {large.numel()}"
            )
        many, one = Side((large,), (small.numel(),) * self.size), Side((small,), (small.numel(),))
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

    def _check_own(self, read: Side, written: Side) -> None:
        """Raise if a rank's part for itself differs in length from the part that it expects."""
        if not read.counts or not written.counts:
            return
        given = read.counts[self.rank if self.collective.scatters else 0]
        taken = written.counts[self.rank if self.collective.gathers else 0]
        if given == taken:
            return
        if self.collective.pairwise:
            raise ValueError(f"this rank sends itself {given} elements but expects {taken}")
        listed, single = (
            (self.collective.input, self.collective.output)
            if self.collective.scatters
            else (self.collective.output, "tensor")
        )
        counts = (given, taken) if self.collective.scatters else (taken, given)
        raise ValueError(
            f"{listed}[{self.rank}] belongs to this rank, whose {single} has {counts[1]} elements, not {counts[0]}"
        )

    def _check_apart(self, read: Side, written: Side) -> None:
        """Raise if results overlap each other or the input, except this rank's own part in place."""
        collective = self.collective
        if collective.reduces or any(
            collective.packed and not t.is_contiguous() for t in (*read.tensors, *written.tensors)
        ):
            # What is copied before it is reduced or sent does no harm.
            return
        sources = _labelled(read.parts(), collective.input, collective.scatters, "the input")
        targets = _labelled(written.parts(), collective.output, collective.gathers, "the tensor")
        check_apart(targets)
        if not collective.pairwise and sources and targets:
            own_source, own_target = self.rank if collective.scatters else 0, self.rank if collective.gathers else 0
            if sources[own_source][1].data_ptr() == targets[own_target][1].data_ptr():
                if collective.gathers:
                    del targets[own_target]
                else:
                    del sources[own_source]
        check_apart(targets, sources)


def _labelled(tensors: Sequence[torch.Tensor], name: str, many: bool, single: str) -> list[tuple[str, torch.Tensor]]:
    """Return each tensor with its name in messages."""
    return [(f"{name}[{index}]" if many else single, tensor) for index, tensor in enumerate(tensors)]


def _check_like(tensor: torch.Tensor, name: str, like: torch.Tensor) -> None:
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}, but the other tensor of the call is {like.dtype} "
            f"on {like.device}; they must be alike"
        )
