"""Collectives and blocking messages of shared memory by the native core: one call for each, whatever its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from unisono.core.call import Call, Fingerprint
from unisono.core.collective import FAMILIES, Collective
from unisono.core.failure import left_error
from unisono.core.tensors import as_flat, copy_back
from unisono.core.transport import Status
from unisono.core.types import MAX_TAG, ReduceOp
from unisono.core.work import missing_ranks_error
from unisono.transports.shm.barrier import SharedBarrier
from unisono.transports.shm.codes import DTYPE_CODES, DTYPES, OP_CODES
from unisono.transports.shm.p2p_ring import MessageRings

__all__ = ["ShmFastPath"]

_OF_BARRIER = OP_CODES["bor"]
_OPS = (str, ReduceOp)


class ShmFastPath:
    """Native calls of one group. Calls that the core does not support are refused, and take the general path.

    Args:
        module: The native core.
        barrier: The counters that the core shares with Python.
        words, stages, rings: Addresses of the counters, of two staging buffers per rank, and of the message rings.
        stage_bytes: The length of a staging buffer.
        oversubscribed: Whether there are more ranks than processors: then a wait yields immediately.
        queues: The memory of the rings.
        mismatch: Raises the error of ranks with different calls.
    """

    def __init__(
        self,
        module: Any,
        barrier: SharedBarrier,
        words: int,
        stages: int,
        rings: int,
        stage_bytes: int,
        oversubscribed: bool,
        queues: memoryview,
        mismatch: Callable[[Fingerprint], NoReturn],
    ) -> None:
        known = [(str(dtype).removeprefix("torch."), dtype.itemsize) for dtype in DTYPES]
        self.core = module.Core(words, stages, rings, stage_bytes, barrier.rank, barrier.size, oversubscribed, known)
        self.mismatch, self.rings = mismatch, MessageRings(barrier, queues, self.core)
        self._barrier, self._rank, self._size = barrier, barrier.rank, barrier.size

    # -- calls as the caller made them ---------------------------------------------------------------
    def try_collective(
        self, collective: Collective, output: Any, input: Any, op: Any, root: Any, deadline: float
    ) -> Status:
        """As of `FastPath`."""
        if collective.root is not None and not (type(root) is int and 0 <= root < self._size):
            return Status.UNSUPPORTED
        operation, root = 0, -1 if root is None else root
        if not collective.moves:
            return self._ended(self.core.call(collective.number, _OF_BARRIER, 0, root, 0, 0, 0, 0, deadline))
        if collective.reduces:
            operation = OP_CODES.get(op, 0) if type(op) in _OPS else 0
            if not operation:
                return Status.UNSUPPORTED
        sides = self._single if collective.packed or collective.in_place else self._lists
        return sides(collective, output, input, operation, root, deadline)

    def _single(
        self, collective: Collective, output: Any, input: Any, operation: int, root: int, deadline: float
    ) -> Status:
        # The root of a broadcast only reads its tensor, and so does each non-root rank of a reduce.
        written = root < 0 or (self._rank == root) == (collective.root == "dst")
        target, address, count = as_flat(output, collective.output, written=written), 0, 0
        if target is None:
            return Status.UNSUPPORTED
        if collective.packed:
            source = as_flat(input, collective.input)
            if source is None or source.dtype is not target.dtype:
                return Status.UNSUPPORTED
            # Each rank's part is some of the rows; the core checks lengths.
            if collective.pairwise and not (
                input.dim() and output.dim() and input.shape[0] % self._size == 0 == output.shape[0] % self._size
            ):
                return Status.UNSUPPORTED
            address, count = source.data_ptr(), source.numel()
        dtype = DTYPE_CODES[target.dtype]
        status = self.core.call(
            collective.number, operation, dtype, root, target.data_ptr(), target.numel(), address, count, deadline
        )
        if target is not output and written and status == Status.OK:
            copy_back(output, target)
        return Status.OK if status == Status.OK else self._ended(status)

    def _lists(
        self, collective: Collective, output: Any, input: Any, operation: int, root: int, deadline: float
    ) -> Status:
        dtype, flats = None, list[tuple[list[torch.Tensor], Sequence[torch.Tensor]]]()
        for given, many, name, written in (
            (output, collective.gathers, collective.output, True),
            (input, collective.scatters, collective.input, False),
        ):
            tensors = (given,) if not many else () if given is None and collective.root is not None else given
            if type(tensors) not in (tuple, list):
                return Status.UNSUPPORTED
            flat: list[torch.Tensor] = []
            for index, tensor in enumerate(tensors):
                found = as_flat(tensor, name, index if many else None, written=written)
                if found is None or (dtype is not None and found.dtype is not dtype):
                    return Status.UNSUPPORTED
                dtype = found.dtype
                flat.append(found)
            flats.append((flat, tensors))
        if dtype is None:
            return Status.UNSUPPORTED
        (targets, outputs), (sources, _) = flats
        memory = *_memory(targets), *_memory(sources)
        status = self.core.call_lists(collective.number, operation, DTYPE_CODES[dtype], root, *memory, True, deadline)
        if status == Status.OK:
            for tensor, result in zip(outputs, targets, strict=True):
                if result is not tensor:
                    copy_back(tensor, result)
        return self._ended(status)

    # -- calls of the general path -------------------------------------------------------------------
    def has_kernel(self, call: Call) -> bool:
        """Return whether there is a kernel for a reduction, or nothing to reduce."""
        return not call.inputs or bool(self.core.has_kernel(*_codes(call)))

    def carry(self, call: Call, deadline: float) -> Status:
        """Carry out a call as a transport receives it."""
        root = -1 if call.root is None else call.root
        memory = *_memory(call.outputs), *_memory(call.inputs)
        number = FAMILIES[call.name].number
        status = self._ended(self.core.call_lists(number, *_codes(call), root, *memory, False, deadline))
        if status is Status.UNSUPPORTED:
            raise RuntimeError(f"the native core refused the tensors of a {call.name}")
        return status

    def compare(self, digest: int, counts: Sequence[int], deadline: float) -> Status:
        """Compare a hash in a separate round, and, if there are any counts, what ranks send each other."""
        return self._ended(self.core.compare(digest, list(counts), deadline))

    # -- messages ------------------------------------------------------------------------------------
    def takes(self, tensor: Any, peer: int, tag: int) -> bool:
        """As of `FastPath`: only while no other messages are in flight, which the rings move."""
        return (
            self.rings.idle
            and type(peer) is int
            and 0 <= peer < self._size
            and peer != self._rank
            and type(tag) is int
            and 0 <= tag <= MAX_TAG
            and isinstance(tensor, torch.Tensor)
        )

    def try_message(self, name: str, tensor: torch.Tensor, peer: int, tag: int, deadline: float) -> Status:
        """As of `FastPath`. A receive is refused if another message comes first."""
        rings, receives = self.rings, name == "recv"
        flat = as_flat(tensor, "tensor", written=receives)
        if flat is None or (receives and tag in rings.early[peer]):
            return Status.UNSUPPORTED
        move = self.core.receive if receives else self.core.send
        with rings.lock:
            rings.held = True
            try:
                status = move(peer, tag, DTYPE_CODES[flat.dtype], flat.data_ptr(), flat.numel(), deadline)
            finally:
                rings.held = False
        if receives and flat is not tensor and status == Status.OK:
            copy_back(tensor, flat)
        return self._ended(status)

    # -- ends ----------------------------------------------------------------------------------------
    def abort(self) -> None:
        """End every wait, from any thread."""
        self.core.abort()

    def _ended(self, status: int) -> Status:
        """Return how a call has ended, or raise its error."""
        if status == Status.OK:
            return Status.OK
        if status in (Status.UNSUPPORTED, Status.MISMATCH):
            return Status(status)
        missing = self.core.missing
        if status == Status.TIMEOUT:
            raise missing_ranks_error(self.core.waited_s, [missing])
        if status == Status.PEER_LEFT:
            raise left_error(missing)
        if status == Status.ABORTED and self._barrier.broken is not None:
            raise self._barrier.broken
        raise RuntimeError(f"the native core ended a call with status {status}")


def _memory(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return addresses and numbers of elements. Uses loops, because Python 3.11 comprehensions are function calls."""
    addresses, counts = [], []
    for tensor in tensors:
        addresses.append(tensor.data_ptr())
        counts.append(tensor.numel())
    return addresses, counts


def _codes(call: Call) -> tuple[int, int]:
    """Return the numbers of a call's operation and dtype; 0 if it has none."""
    tensors, op = call.inputs or call.outputs, ReduceOp.AVG if call.average else call.op
    return 0 if op is None else OP_CODES[op], DTYPE_CODES[tensors[0].dtype] if tensors else 0
