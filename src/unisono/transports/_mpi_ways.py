"""The calls of MPI by which collectives on plain tensors are made the shorter way: one function a collective.

Each takes what calls of one kind have in common, and gives what is left to do for one of them: MPI's function,
and how its arguments come from the tensors. They are those of the longer way, since other ranks may take that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from unisono.transports._mpi_comms import Comms
from unisono.transports._mpi_parts import LONGEST

__all__ = ["WAYS", "Kind", "Way"]

Arguments = tuple[Any, ...]
Describe = Callable[[Any, Any], "Arguments | None"]
"""MPI's arguments from what is written and what is read; None if how they lie in memory takes more preparation."""

Place = Callable[[Any, Any], object]
"""What a rank gives itself; done when all have agreed."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What calls have in common.

    Attributes:
        comms: Of the ranks that take part.
        dtype: Of all tensors.
        targets, sources: Elements of what is written and read: of one tensor or one a rank; none where none is given.
        root: The rank that a rooted call is about.
        element, op: MPI's, for what reduces.
    """

    comms: Comms
    dtype: torch.dtype
    targets: tuple[int, ...]
    sources: tuple[int, ...]
    root: int | None
    element: Any = None
    op: Any = None

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
        place: What comes before, if anything does.
        sends, receives: Elements to and from each rank, where they agree by pairs.
    """

    begin: Callable[..., object]
    describe: Describe
    counts: tuple[int, ...]
    place: Place | None = None
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


def _all_reduce(kind: Kind) -> Way:
    in_place, element, op, whole = kind.comms.mpi.IN_PLACE, kind.element, kind.op, kind.whole
    return Way(kind.comms.own.Allreduce, lambda t, _: (in_place, [whole(t), element], op), kind.targets)


def _reduce(kind: Kind) -> Way:
    in_place, element, op, root, whole = kind.comms.mpi.IN_PLACE, kind.element, kind.op, kind.root, kind.whole
    if kind.rank == root:
        return Way(kind.comms.own.Reduce, lambda t, _: (in_place, [whole(t), element], op, root), kind.targets)
    return Way(kind.comms.own.Reduce, lambda t, _: ([whole(t), element], None, op, root), kind.targets)


def _broadcast(kind: Kind) -> Way:
    byte, root, whole = kind.comms.mpi.BYTE, kind.root, kind.whole
    return Way(kind.comms.own.Bcast, lambda t, _: ([whole(t), byte], root), kind.targets)


def _reduce_scatter_single(kind: Kind) -> Way | None:
    element, op, whole = kind.element, kind.op, kind.whole
    if kind.sources[0] != kind.targets[0] * kind.size:
        return None

    def describe(target: torch.Tensor, source: torch.Tensor) -> Arguments | None:
        if _touch(target, source):
            return None
        return [whole(source), element], [whole(target), element], op

    return Way(kind.comms.own.Reduce_scatter_block, describe, kind.targets * kind.size)


def _reduce_scatter(kind: Kind) -> Way | None:
    element, op = kind.element, kind.op
    if kind.sources != kind.targets * kind.size:
        return None
    step = kind.targets[0] * kind.dtype.itemsize
    extent = step * kind.size

    def describe(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> Arguments | None:
        first = sources[0].data_ptr()
        # Others, and those that are read and written, take a copy.
        if any(source.data_ptr() != first + step * rank for rank, source in enumerate(sources)):
            return None
        if -step < target.data_ptr() - first < extent:
            return None
        return [kind.comms.mpi.buffer.fromaddress(first, extent), element], [kind.whole(target), element], op

    return Way(kind.comms.own.Reduce_scatter_block, describe, kind.sources)


def _all_gather_single(kind: Kind) -> Way | None:
    in_place, byte, whole = kind.comms.mpi.IN_PLACE, kind.comms.mpi.BYTE, kind.whole
    if kind.targets[0] != kind.sources[0] * kind.size:
        return None
    ahead = kind.rank * kind.sources[0] * kind.dtype.itemsize

    def describe(target: torch.Tensor, source: torch.Tensor) -> Arguments | None:
        if _touch(target, source) and source.data_ptr() != target.data_ptr() + ahead:
            return None
        return in_place, [whole(target), byte]

    def place(target: torch.Tensor, source: torch.Tensor) -> None:
        ctypes.memmove(target.data_ptr() + ahead, source.data_ptr(), source.nbytes)

    return Way(kind.comms.own.Allgather, describe, kind.sources * kind.size, place)


def _all_to_all_single(kind: Kind) -> Way | None:
    byte, whole = kind.comms.mpi.BYTE, kind.whole
    if kind.targets != kind.sources or kind.targets[0] % kind.size:
        return None
    each = kind.targets[0] // kind.size
    step = each * kind.dtype.itemsize
    counts, places, ahead = [step] * kind.size, [step * rank for rank in range(kind.size)], step * kind.rank
    counts[kind.rank] = 0

    def describe(target: torch.Tensor, source: torch.Tensor) -> Arguments | None:
        # It is rows that are given and taken.
        if _touch(target, source) or any(not t.dim() or t.shape[0] % len(counts) for t in (target, source)):
            return None
        return [whole(source), counts, places, byte], [whole(target), counts, places, byte]

    def place(target: torch.Tensor, source: torch.Tensor) -> None:
        ctypes.memmove(target.data_ptr() + ahead, source.data_ptr() + ahead, step)

    lengths = (each,) * kind.size
    return Way(kind.comms.own.Alltoallv, describe, (), place, lengths, lengths)


def _all_to_all(kind: Kind) -> Way | None:
    rank = kind.rank
    if not len(kind.targets) == len(kind.sources) == kind.size or kind.targets[rank] != kind.sources[rank]:
        return None
    taken, given = _Parts(kind, kind.targets, without=rank), _Parts(kind, kind.sources, without=rank)

    def describe(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Arguments | None:
        into, out = taken.described(targets), given.described(sources)
        if into is None or out is None or any(_touch(t, s) for t in targets for s in sources):
            return None
        return out, into

    def place(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        _copy(targets[rank], sources[rank])

    return Way(kind.comms.own.Alltoallv, describe, (), place, kind.sources, kind.targets)


def _all_gather(kind: Kind) -> Way | None:
    rank, in_place = kind.rank, kind.comms.mpi.IN_PLACE
    if len(kind.targets) != kind.size or kind.sources != kind.targets[rank : rank + 1]:
        return None
    gathered = _Parts(kind, kind.targets)

    def describe(targets: Sequence[torch.Tensor], source: torch.Tensor) -> Arguments | None:
        into = gathered.described(targets, source)
        return into and (in_place, into)

    def place(targets: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        _copy(targets[rank], source)

    return Way(kind.comms.own.Allgatherv, describe, kind.targets, place)


def _gather(kind: Kind) -> Way | None:
    rank, root, in_place, byte, whole = kind.rank, kind.root, kind.comms.mpi.IN_PLACE, kind.comms.mpi.BYTE, kind.whole
    begin = kind.comms.own.Gatherv
    if rank != root:
        return None if kind.targets else Way(begin, lambda _, s: ([whole(s), byte], None, root), kind.sources)
    if kind.targets != kind.sources * kind.size:
        return None
    gathered = _Parts(kind, kind.targets)

    def describe(targets: Sequence[torch.Tensor], source: torch.Tensor) -> Arguments | None:
        into = gathered.described(targets, source)
        return into and (in_place, into, root)

    def place(targets: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        _copy(targets[rank], source)

    return Way(begin, describe, kind.sources, place)


def _scatter(kind: Kind) -> Way | None:
    rank, root, in_place, byte, whole = kind.rank, kind.root, kind.comms.mpi.IN_PLACE, kind.comms.mpi.BYTE, kind.whole
    begin = kind.comms.own.Scatterv
    if rank != root:
        return None if kind.sources else Way(begin, lambda t, _: (None, [whole(t), byte], root), kind.targets)
    if kind.sources != kind.targets * kind.size:
        return None
    scattered = _Parts(kind, kind.sources)

    def describe(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> Arguments | None:
        given = scattered.described(sources, target)
        return given and (given, in_place, root)

    def place(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        _copy(target, sources[rank])

    return Way(begin, describe, kind.targets, place)


class _Parts:
    """Tensors of given lengths, one a rank, as MPI takes them: as they lie, from the first to the last.

    Args:
        kind: Of the call.
        counts: Elements of each.
        without: Whose part does not pass through MPI.
    """

    def __init__(self, kind: Kind, counts: tuple[int, ...], without: int | None = None) -> None:
        self._kind, self._sizes = kind, [count * kind.dtype.itemsize for count in counts]
        self._close = [0, *accumulate(self._sizes[:-1])]
        self._counts = [0 if rank == without else nbytes for rank, nbytes in enumerate(self._sizes)]

    def described(self, tensors: Sequence[torch.Tensor], own: torch.Tensor | None = None) -> Any:
        """None if some share memory, or lie too far apart; or if `own` touches them, but in this rank's place."""
        first, sizes = tensors[0].data_ptr(), self._sizes
        places = [tensor.data_ptr() - first for tensor in tensors]
        extent = self._close[-1] + sizes[-1]
        if places != self._close:
            spans = sorted(zip(places, sizes, strict=True))
            if any(place + nbytes > after for (place, nbytes), (after, _) in pairwise(spans)):
                return None
            low = spans[0][0]
            first, extent, places = first + low, sum(spans[-1]) - low, [place - low for place in places]
            if extent > LONGEST:
                return None
        if own is not None:
            ahead = own.data_ptr() - first
            if -own.nbytes < ahead < extent and ahead != places[self._kind.rank]:
                return None
        mpi = self._kind.comms.mpi
        return [mpi.buffer.fromaddress(first, extent), self._counts, places, mpi.BYTE]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def _touch(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    ahead = other.data_ptr() - one.data_ptr()
    return -other.nbytes < ahead < one.nbytes


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
