"""The calls of MPI by which collectives on plain tensors are made the shorter way: one function a collective.

Each takes what calls of one kind have in common, and gives what is left to do for one of them: MPI's function,
and how its arguments come from the tensors. They are those of the longer way, since other ranks may take that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from unisono.transports._mpi_comms import Comms
from unisono.transports._mpi_lists import Parts, levelled, touch
from unisono.transports._mpi_scattering import deal, dealt, one_each, reduce_each, take
from unisono.transports._mpi_stages import summed_by
from unisono.transports._mpi_window import Level, Near, level_by

__all__ = ["WAYS", "Kind", "Way"]

_Arguments = tuple[Any, ...]
_Describe = Callable[[Any, Any], "_Arguments | None"]
"""MPI's arguments from what is written and what is read; None if how they lie in memory takes more preparation."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What calls have in common.

    Attributes:
        comms: Of the ranks that take part.
        dtype: Of all tensors.
        targets, sources: Elements of what is written and read: of one tensor or one a rank; none where none is given.
        root: The rank that a rooted call is about.
        element, op: MPI's, for what reduces.
        near: What ranks of one host have beside MPI.
    """

    comms: Comms
    dtype: torch.dtype
    targets: tuple[int, ...]
    sources: tuple[int, ...]
    root: int | None
    element: Any = None
    op: Any = None
    near: Near = field(default_factory=Near)

    @property
    def rank(self) -> int:
        rank: int = self.comms.own.Get_rank()
        return rank

    @property
    def size(self) -> int:
        size: int = self.comms.own.Get_size()
        return size

    @property
    def nbytes(self) -> int:
        """Of the longer side."""
        return max(sum(self.targets), sum(self.sources)) * self.dtype.itemsize

    def whole(self, tensor: torch.Tensor) -> Any:
        """A tensor's memory."""
        return self.comms.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


class Way(NamedTuple):
    """How calls of one kind are made.

    Attributes:
        begin: MPI's function.
        describe: Its arguments.
        counts: Elements that all ranks agree on.
        sends, receives: Elements to and from each rank, where they agree by pairs.
        level: How they are made if every rank's parts are of one length, and fit for it.
    """

    begin: Callable[..., object]
    describe: _Describe
    counts: tuple[int, ...]
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    level: Level | None = None


def _all_reduce(kind: Kind) -> Way:
    in_place, element, op, whole = kind.comms.mpi.IN_PLACE, kind.element, kind.op, kind.whole
    begin, level = kind.comms.own.Allreduce, summed_by(kind)
    return Way(begin, lambda t, _: (in_place, [whole(t), element], op), kind.targets, level=level)


def _reduce(kind: Kind) -> Way:
    in_place, element, op, root, whole = kind.comms.mpi.IN_PLACE, kind.element, kind.op, kind.root, kind.whole
    begin, level = kind.comms.own.Reduce, summed_by(kind)
    if kind.rank == root:
        return Way(begin, lambda t, _: (in_place, [whole(t), element], op, root), kind.targets, level=level)
    return Way(begin, lambda t, _: ([whole(t), element], None, op, root), kind.targets, level=level)


def _broadcast(kind: Kind) -> Way:
    byte, root, whole = kind.comms.mpi.BYTE, kind.root, kind.whole
    level = level_by("broadcast", kind, kind.nbytes, None)
    return Way(kind.comms.own.Bcast, lambda t, _: ([whole(t), byte], root), kind.targets, level=level)


def _reduce_scatter_single(kind: Kind) -> Way | None:
    element, op, whole, counts = kind.element, kind.op, kind.whole, kind.targets * kind.size
    if kind.sources[0] != sum(counts):
        return None
    if one_each(kind.comms.mpi, counts, kind.dtype.itemsize):
        return Way(*_one_each(kind, lambda source: source.view(-1).split(kind.targets[0])), counts)

    def describe(target: torch.Tensor, source: torch.Tensor) -> _Arguments | None:
        if touch(target, source):
            return None
        return [whole(source), element], [whole(target), element], op

    return Way(kind.comms.own.Reduce_scatter_block, describe, counts)


def _reduce_scatter(kind: Kind) -> Way | None:
    element, op = kind.element, kind.op
    if kind.sources != kind.targets * kind.size:
        return None
    if one_each(kind.comms.mpi, kind.sources, kind.dtype.itemsize):
        return Way(*_one_each(kind, lambda sources: sources), kind.sources)
    step = kind.targets[0] * kind.dtype.itemsize
    extent = step * kind.size

    def describe(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> _Arguments | None:
        first = sources[0].data_ptr()
        # Others, and those that are read and written, take a copy.
        if any(source.data_ptr() != first + step * rank for rank, source in enumerate(sources)):
            return None
        if -step < target.data_ptr() - first < extent:
            return None
        return [kind.comms.mpi.buffer.fromaddress(first, extent), element], [kind.whole(target), element], op

    return Way(kind.comms.own.Reduce_scatter_block, describe, kind.sources)


def _one_each(kind: Kind, split: Callable[[Any], Sequence[torch.Tensor]]) -> tuple[Callable[..., object], _Describe]:
    """A reduction for each rank, and its arguments from what is written and the parts that are read."""
    reduce, rank, element, op, whole = kind.comms.own.Reduce, kind.rank, kind.element, kind.op, kind.whole
    in_place = kind.comms.mpi.IN_PLACE

    def describe(target: torch.Tensor, source: Any) -> _Arguments | None:
        parts = split(source)
        here = target.data_ptr() == parts[rank].data_ptr()
        if any(touch(target, part) for root, part in enumerate(parts) if not here or root != rank):
            return None
        calls: list[tuple[Any, Any]] = [([whole(part), element], None) for part in parts]
        calls[rank] = (in_place if here else calls[rank][0], [whole(target), element])
        return calls, op

    return partial(reduce_each, reduce), describe


def _all_gather_single(kind: Kind) -> Way | None:
    byte, whole = kind.comms.mpi.BYTE, kind.whole
    if kind.targets[0] != kind.sources[0] * kind.size:
        return None

    def describe(target: torch.Tensor, source: torch.Tensor) -> _Arguments | None:
        return None if touch(target, source) else ([whole(source), byte], [whole(target), byte])

    level = level_by("all_gather", kind, kind.sources[0] * kind.dtype.itemsize, None)
    return Way(kind.comms.own.Allgather, describe, kind.sources * kind.size, level=level)


def _all_to_all_single(kind: Kind) -> Way | None:
    byte, whole = kind.comms.mpi.BYTE, kind.whole
    if kind.targets != kind.sources or kind.targets[0] % kind.size:
        return None
    each = kind.targets[0] // kind.size
    step = each * kind.dtype.itemsize
    counts, places = [step] * kind.size, [step * rank for rank in range(kind.size)]

    def describe(target: torch.Tensor, source: torch.Tensor) -> _Arguments | None:
        # It is rows that are given and taken.
        if touch(target, source) or any(not t.dim() or t.shape[0] % len(counts) for t in (target, source)):
            return None
        return [whole(source), counts, places, byte], [whole(target), counts, places, byte]

    lengths = (each,) * kind.size
    level = level_by("all_to_all", kind, step, kind.comms.own.Alltoall)
    return Way(kind.comms.own.Alltoallv, describe, (), lengths, lengths, level)


def _all_to_all(kind: Kind) -> Way | None:
    rank = kind.rank
    if not len(kind.targets) == len(kind.sources) == kind.size or kind.targets[rank] != kind.sources[rank]:
        return None
    taken, given = (Parts(kind.comms, kind.dtype, counts) for counts in (kind.targets, kind.sources))

    def describe(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> _Arguments | None:
        into, out = taken.described(targets), given.described(sources)
        if into is None or out is None or any(touch(t, s) for t in targets for s in sources):
            return None
        return out, into

    level = level_by("all_to_all", kind, kind.targets[rank] * kind.dtype.itemsize, kind.comms.own.Alltoall)
    return Way(kind.comms.own.Alltoallv, describe, (), kind.sources, kind.targets, level)


def _all_gather(kind: Kind) -> Way | None:
    rank, byte, whole = kind.rank, kind.comms.mpi.BYTE, kind.whole
    if len(kind.targets) != kind.size or kind.sources != kind.targets[rank : rank + 1]:
        return None
    gathered = Parts(kind.comms, kind.dtype, kind.targets)

    def describe(targets: Sequence[torch.Tensor], source: torch.Tensor) -> _Arguments | None:
        into = None if touch(targets[rank], source) else gathered.described(targets, source)
        return into and ([whole(source), byte], into)

    level = level_by("all_gather", kind, kind.sources[0] * kind.dtype.itemsize, kind.comms.own.Allgather)
    return Way(kind.comms.own.Allgatherv, describe, kind.targets, level=level)


def _gather(kind: Kind) -> Way | None:
    rank, root, in_place, byte, whole = kind.rank, kind.root, kind.comms.mpi.IN_PLACE, kind.comms.mpi.BYTE, kind.whole
    begin, level = (
        kind.comms.own.Gatherv,
        level_by("gather", kind, kind.sources[0] * kind.dtype.itemsize, kind.comms.own.Gather),
    )
    if (kind.targets != kind.sources * kind.size) if rank == root else kind.targets:
        return None
    if rank != root:
        return Way(begin, lambda _, s: ([whole(s), byte], None, root), kind.sources, level=level)
    gathered = Parts(kind.comms, kind.dtype, kind.targets)

    def describe(targets: Sequence[torch.Tensor], source: torch.Tensor) -> _Arguments | None:
        into = gathered.described(targets, source)
        here = targets[rank].data_ptr() == source.data_ptr()
        return into and (in_place if here else [whole(source), byte], into, root)

    return Way(begin, describe, kind.sources, level=level)


def _scatter(kind: Kind) -> Way | None:
    rank, root, in_place, byte, whole = kind.rank, kind.root, kind.comms.mpi.IN_PLACE, kind.comms.mpi.BYTE, kind.whole
    if (kind.sources != kind.targets * kind.size) if rank == root else kind.sources:
        return None
    if dealt(kind.comms.mpi, kind.nbytes // (kind.size if rank == root else 1)):
        return _dealt(kind)
    begin, level = kind.comms.own.Scatterv, Level(kind.comms.own.Scatter, levelled)
    if rank != root:
        return Way(begin, lambda t, _: (None, [whole(t), byte], root), kind.targets, level=level)
    scattered = Parts(kind.comms, kind.dtype, kind.sources)

    def describe(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> _Arguments | None:
        given = scattered.described(sources, target)
        here = sources[rank].data_ptr() == target.data_ptr()
        return given and (given, in_place if here else [whole(target), byte], root)

    return Way(begin, describe, kind.targets, level=level)


def _dealt(kind: Kind) -> Way:
    """Of a scatter, as one message for each rank."""
    rank, root, byte, whole = kind.rank, kind.root, kind.comms.mpi.BYTE, kind.whole
    level = level_by("scatter", kind, kind.targets[0] * kind.dtype.itemsize, None)
    if rank != root:
        return Way(partial(take, kind.comms), lambda t, _: ([whole(t), byte], root), kind.targets, level=level)

    def describe(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> _Arguments | None:
        here = target.data_ptr() == sources[rank].data_ptr()
        others = [(other, source) for other, source in enumerate(sources) if other != rank]
        if any(touch(target, source) for source in (sources if not here else (source for _, source in others))):
            return None
        parts = [([whole(source), byte], other) for other, source in others]
        return parts, None if here else (target.data_ptr(), sources[rank].data_ptr(), target.nbytes)

    return Way(partial(deal, kind.comms), describe, kind.targets, level=level)


WAYS: dict[str, Callable[[Kind], Way | None]] = {
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "scatter": _scatter,
}
