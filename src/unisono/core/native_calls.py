"""Collectives by a native core: one call for each, whatever its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from unisono.core.call import Call, Fingerprint, hash_of
from unisono.core.collective import FAMILIES, Collective
from unisono.core.failure import connection_error, left_error
from unisono.core.tensors import as_flat, copy_back
from unisono.core.transport import Status
from unisono.core.types import ReduceOp
from unisono.core.work import missing_ranks_error

__all__ = ["DTYPES", "DTYPE_CODES", "OP_CODES", "NativeCalls", "codes_of", "known_dtypes", "memory_of"]

OP_CODES: dict[str, int] = {op.value: code for code, op in enumerate(ReduceOp, 1)}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES, 1)}
"""Numbers of dtypes and reduce operations: the same on all ranks, and in src/native."""

_OF_BARRIER = OP_CODES["bor"]
_OPS = (str, ReduceOp)


class NativeCalls(ABC):
    """Native collectives of one group. Calls that the core does not support are refused, and take the general path.

    Args:
        core: The native core.
        rank, size: This rank, and the number of ranks.
    """

    def __init__(self, core: Any, rank: int, size: int) -> None:
        self.core, self._rank, self._size = core, rank, size

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
        memory = *memory_of(targets), *memory_of(sources)
        status = self.core.call_lists(collective.number, operation, DTYPE_CODES[dtype], root, *memory, True, deadline)
        if status == Status.OK:
            for tensor, result in zip(outputs, targets, strict=True):
                if result is not tensor:
                    copy_back(tensor, result)
        return self._ended(status)

    # -- calls of the general path -------------------------------------------------------------------
    def has_kernel(self, call: Call) -> bool:
        """Return whether there is a kernel for a reduction, or nothing to reduce."""
        return not call.inputs or bool(self.core.has_kernel(*codes_of(call)))

    def carry(self, call: Call, deadline: float) -> None:
        """Carry out a call as a transport receives it."""
        root = -1 if call.root is None else call.root
        memory = *memory_of(call.outputs), *memory_of(call.inputs)
        number = FAMILIES[call.name].number
        self.check(self.core.call_lists(number, *codes_of(call), root, *memory, False, deadline), call.fingerprint)

    def compare(self, fingerprint: Fingerprint, deadline: float, *, shapes: bool = False) -> None:
        """Compare everything in separate rounds; return when all ranks are known to make the same call."""
        counts = [*fingerprint.sends, *fingerprint.receives]
        digest = hash_of(fingerprint.compared(shapes=shapes)[1:])
        self.check(self.core.compare(digest, counts, deadline), fingerprint)

    def check(self, status: int, fingerprint: Fingerprint) -> None:
        """Raise the error of a call of the general path that has ended with this status, if it is one."""
        ended = self._ended(status)
        if ended is Status.MISMATCH:
            self.mismatch(fingerprint)
        if ended is Status.UNSUPPORTED:
            raise RuntimeError(f"the native core refused the tensors of a {fingerprint.operation}")

    # -- ends ----------------------------------------------------------------------------------------
    @abstractmethod
    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """As of `FastPath`."""

    @abstractmethod
    def _cause(self) -> BaseException | None:
        """Return why waits were ended."""

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
        if status == Status.PEER_LOST:
            raise connection_error(missing)
        if status == Status.ABORTED and (cause := self._cause()) is not None:
            raise cause
        raise RuntimeError(f"the native core ended a call with status {status}")


def known_dtypes() -> list[tuple[str, int]]:
    """Return names and widths of all dtypes, in the order of their numbers."""
    return [(str(dtype).removeprefix("torch."), dtype.itemsize) for dtype in DTYPES]


def memory_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return addresses and numbers of elements. Uses loops, because Python 3.11 comprehensions are function calls."""
    addresses, counts = [], []
    for tensor in tensors:
        addresses.append(tensor.data_ptr())
        counts.append(tensor.numel())
    return addresses, counts


def codes_of(call: Call) -> tuple[int, int]:
    """Return the numbers of a call's operation and dtype; 0 if it has none."""
    tensors, op = call.inputs or call.outputs, ReduceOp.AVG if call.average else call.op
    return 0 if op is None else OP_CODES[op], DTYPE_CODES[tensors[0].dtype] if tensors else 0
