"""MPI's collectives on tensors: which calls MPI supports, and how each call is made.

MPI needs the tensors of a list in a single block of memory. If a list of tensors spans at most 2 GiB of addresses, a
rank passes this range of memory to MPI without a copy; otherwise, the rank copies the tensors once. Each rank decides
by itself whether to copy its tensors. The choice of the MPI call depends only on the collective, not on the copy, so
all ranks make the same MPI call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from unisono.core.call import Call
from unisono.core.collective import FAMILIES
from unisono.core.tensors import numels
from unisono.transports.mpi.communicators import MpiCommunicators
from unisono.transports.mpi.reduce_op import finish, prepare, prepares, reducible
from unisono.transports.mpi.requests import LONGEST, memory
from unisono.transports.mpi.watchdog import Watchdog

__all__ = ["MOST_BYTES", "NATIVE", "MpiCollectives", "carries", "in_one_call", "too_long"]

MOST_BYTES = 2**31 - 1
_LISTS = frozenset({"all_gather", "gather", "scatter", "reduce_scatter"})


def carries(call: Call, size: int) -> bool:
    """Return whether MPI gives the correct result for a call. The answer is the same on every rank."""
    if FAMILIES[call.name].reduces and not reducible(call.inputs[0].dtype, call.op):
        return False
    if call.name not in _LISTS:
        return call.name in NATIVE
    if call.lengths:
        return sum(call.lengths) * (call.inputs or call.outputs)[0].itemsize <= MOST_BYTES
    if call.name in ("gather", "scatter"):
        tensor = (call.inputs if call.name == "gather" else call.outputs)[0]
        return tensor.nbytes * size <= MOST_BYTES
    return sum(t.nbytes for t in (call.outputs if call.name == "all_gather" else call.inputs)) <= MOST_BYTES


def in_one_call(nbytes: int) -> bool:
    """Return whether one MPI call can move this many bytes."""
    return nbytes <= MOST_BYTES


def too_long(sends: Sequence[int], receives: Sequence[int], dtype: str | None) -> bool:
    """Return whether this rank sends or receives more in an all_to_all than one MPI call can move."""
    return bool(dtype) and max(sum(sends), sum(receives)) * getattr(torch, str(dtype)).itemsize > MOST_BYTES


class MpiCollectives:
    """Runs MPI collectives. Each call returns once this rank's part of the collective is done.

    Args:
        comms: The communicators of the participating ranks.
        watch: Watchdog that enforces deadlines, which MPI calls do not have.
    """

    def __init__(self, comms: MpiCommunicators, watch: Watchdog) -> None:
        self._comms = comms
        self._mpi = comms.mpi
        self._comm = comms.own
        self.watch = watch
        self._rank = self._comm.Get_rank()

    def carry(self, call: Call, deadline: float) -> None:
        """Run a call that every rank has reached."""
        # Skip an empty call, but only if it is empty on all ranks: in an all_to_all, other ranks may have data. A
        # barrier is also done, because comparing the calls has shown that all ranks have arrived.
        lengths = call.lengths or numels((*call.inputs, *call.outputs))
        if call.name != "all_to_all" and not any(lengths):
            return
        self._comms.deadline = deadline
        self.watch.arm()
        try:
            with self._comms.turn:
                _RUN[call.name](self, call)
        except self._mpi.Exception as error:
            raise self._comms.error_of(error) from error
        finally:
            self._comms.deadline = None

    def _described(self, tensor: torch.Tensor, kind: Any = None, start: int = 0, stop: int | None = None) -> list[Any]:
        """Return a tensor's elements as an MPI buffer, or its bytes if no element type is given."""
        if kind is None:
            return [memory(self._comms, tensor), self._mpi.BYTE]
        width = tensor.itemsize
        stop = tensor.numel() if stop is None else stop
        return [memory(self._comms, tensor, start * width, (stop - start) * width), stop - start, kind]

    # -- reductions ----------------------------------------------------------------------------
    def _reduce_all(self, call: Call) -> None:
        tensor, kind, op = prepare(self._mpi, call.outputs[0], call.op)
        for start, stop in _cuts(tensor.numel()):
            self._comm.Allreduce(self._mpi.IN_PLACE, self._described(tensor, kind, start, stop), op)
        finish(call.outputs[0], call.op)

    def _reduce(self, call: Call) -> None:
        root = call.root
        here = call.root == self._rank
        tensor, kind, op = prepare(self._mpi, call.inputs[0], call.op)
        for start, stop in _cuts(tensor.numel()):
            given = self._described(tensor, kind, start, stop)
            self._comm.Reduce(self._mpi.IN_PLACE if here else given, given if here else None, op, root)
        if here:
            finish(call.outputs[0], call.op)

    def _reduce_scatter(self, call: Call) -> None:
        target = call.outputs[0]
        whole = torch.cat(call.inputs) if call.packed is None else call.packed
        if whole is call.packed and prepares(whole.dtype, call.op):
            # `prepare` overwrites its tensor, and the caller's memory must not change.
            whole = whole.clone()
        packed, kind, op = prepare(self._mpi, whole, call.op)
        factor = packed.numel() // max(1, whole.numel())
        counts = [t.numel() * factor for t in call.inputs]
        given = memory(self._comms, packed)
        into = [memory(self._comms, target), target.numel() * factor, kind]
        if len(set(counts)) > 1:
            self._comm.Reduce_scatter([given, packed.numel(), kind], into, counts, op)
        else:
            self._comm.Reduce_scatter_block([given, kind], into, op)
        finish(target, call.op)

    # -- data movement -------------------------------------------------------------------------
    def _broadcast(self, call: Call) -> None:
        tensor = call.outputs[0]
        for start, stop in _cuts(tensor.nbytes):
            self._comm.Bcast([memory(self._comms, tensor, start, stop - start), self._mpi.BYTE], call.root)

    def _gather(self, call: Call) -> None:
        if call.root != self._rank:
            self._comm.Gatherv(self._described(call.inputs[0]), None, call.root)
            return
        _copy_if_distinct(call.outputs[self._rank], call.inputs[0])
        pieces = _VectorBuffer(self._comms, call.outputs)
        pieces.copy_in(self._rank)
        self._comm.Gatherv(self._mpi.IN_PLACE, pieces.described(), call.root)
        pieces.copy_out()

    def _scatter(self, call: Call) -> None:
        if call.root != self._rank:
            self._comm.Scatterv(None, self._described(call.outputs[0]), call.root)
            return
        pieces = _VectorBuffer(self._comms, call.inputs)
        pieces.copy_in()
        self._comm.Scatterv(pieces.described(), self._mpi.IN_PLACE, call.root)
        _copy_if_distinct(call.outputs[0], call.inputs[self._rank])

    def _all_gather(self, call: Call) -> None:
        # Copy an input that is also an output: MPI allows IN_PLACE only if all ranks use it.
        given = call.inputs[0]
        if call.outputs and call.outputs[self._rank].data_ptr() == given.data_ptr():
            given = given.clone()
        if call.packed is not None:
            self._comm.Allgather(self._described(given), self._described(call.packed))
            return
        pieces = _VectorBuffer(self._comms, call.outputs)
        self._comm.Allgatherv(self._described(given), pieces.described())
        pieces.copy_out()

    def _all_to_all(self, call: Call) -> None:
        _copy_if_distinct(call.outputs[self._rank], call.inputs[self._rank])
        sent, received = (
            _VectorBuffer(self._comms, tensors, without=self._rank) for tensors in (call.inputs, call.outputs)
        )
        sent.copy_in()
        self._comm.Alltoallv(sent.described(), received.described())
        received.copy_out()


class _VectorBuffer:
    """Tensors, one per rank, as one block of memory with an offset for each tensor."""

    def __init__(self, comms: MpiCommunicators, tensors: Sequence[torch.Tensor], without: int | None = None) -> None:
        self._comms = comms
        self._tensors = list(tensors)
        self._counts = [0 if rank == without else t.nbytes for rank, t in enumerate(tensors)]
        addresses = [(t.data_ptr(), n) for t, n in zip(tensors, self._counts, strict=True) if n]
        first = min((address for address, _ in addresses), default=0)
        self._extent = max((address + n for address, n in addresses), default=0) - first
        self._first = first
        self._offsets = [t.data_ptr() - first if n else 0 for t, n in zip(tensors, self._counts, strict=True)]
        # For each rank, its part of the staging memory; empty if MPI can use the tensors' own memory.
        self._parts: list[tuple[int, torch.Tensor]] = []
        if self._extent > MOST_BYTES:
            self._extent = sum(self._counts)
            self._offsets = [0, *accumulate(self._counts[:-1])]
            stage = torch.empty(self._extent, dtype=torch.uint8, device="cpu")
            self._first = stage.data_ptr()
            self._parts = [(rank, part) for rank, part in enumerate(stage.split(self._counts)) if part.numel()]

    def described(self) -> list[Any]:
        mpi = self._comms.mpi
        return [mpi.buffer.fromaddress(self._first, self._extent), self._counts, self._offsets, mpi.BYTE]

    def copy_in(self, only: int | None = None) -> None:
        """Before the call, copy the inputs to the staging memory, if any."""
        for rank, part in self._parts:
            if only in (None, rank):
                part.copy_(self._tensors[rank].view(torch.uint8))

    def copy_out(self) -> None:
        """After the call, copy the outputs from the staging memory, if any."""
        for rank, part in self._parts:
            self._tensors[rank].view(torch.uint8).copy_(part)


def _cuts(count: int) -> list[tuple[int, int]]:
    return [(start, min(count, start + LONGEST)) for start in range(0, count, LONGEST)]


def _copy_if_distinct(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


_RUN: dict[str, Callable[[MpiCollectives, Call], None]] = {
    "all_gather": MpiCollectives._all_gather,
    "all_reduce": MpiCollectives._reduce_all,
    "all_to_all": MpiCollectives._all_to_all,
    "broadcast": MpiCollectives._broadcast,
    "gather": MpiCollectives._gather,
    "reduce": MpiCollectives._reduce,
    "reduce_scatter": MpiCollectives._reduce_scatter,
    "scatter": MpiCollectives._scatter,
}

NATIVE = frozenset({*_RUN, "barrier"})
