"""Blocking collectives directly on the caller's tensors, one MPI call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from unisono.core.call import NATIVE, Call, Fingerprint
from unisono.core.collective import Collective
from unisono.core.numbers import Status
from unisono.core.tensors import as_flat, check_reducible, copy_back
from unisono.core.types import ReduceOp
from unisono.transports.mpi.collectives import in_one_call
from unisono.transports.mpi.consistency import MpiAgreement, word_of
from unisono.transports.mpi.reduce_op import prepares, reducible

__all__ = ["MpiFastPath"]

_OPS: dict[Any, ReduceOp] = {op.value: op for op in ReduceOp if op is not ReduceOp.AVG}


class MpiFastPath:
    """One group's fast path: calls with a single output tensor whose elements MPI takes without conversion.

    Calls with lists of tensors, averages, and reductions that MPI cannot do in place use the general path, which makes
    the same MPI calls.

    Args:
        agreement: Comparison of all ranks' calls.
        run: Function that runs a call that all ranks have reached, given the call and its deadline.
        rank, size: This rank, and the number of ranks.
        mismatch: Function that raises the error for ranks that make different calls.
    """

    def __init__(
        self,
        agreement: MpiAgreement,
        run: Callable[[Call, float], None],
        rank: int,
        size: int,
        mismatch: Callable[[Fingerprint], NoReturn],
    ) -> None:
        self._agreement = agreement
        self._run = run
        self._rank = rank
        self._size = size
        self.mismatch = mismatch

    def try_collective(
        self,
        collective: Collective,
        output: Any,
        input: Any,
        op: Any,
        root: Any,
        algorithm: str | None,
        deadline: float,
    ) -> Status:
        """Implement `FastPath`, without support for explicit algorithms."""
        if algorithm is not None:
            return Status.UNSUPPORTED
        if collective.root is not None and not (type(root) is int and 0 <= root < self._size):
            return Status.UNSUPPORTED
        if not collective.moves:
            word = word_of(Fingerprint(0, collective.name, ReduceOp.BOR.value, algorithm=NATIVE))
            return Status.OK if self._agreement.check(word, deadline) else Status.MISMATCH
        if not (collective.in_place or collective.packed):
            return Status.UNSUPPORTED
        writes = collective.writes(self._rank, root)
        target = as_flat(output, collective.output, written=writes)
        source = target if collective.in_place else as_flat(input, collective.input)
        if target is None or source is None or not self._fits(collective, target, source, input, output):
            return Status.UNSUPPORTED
        operation = None
        dtype = str(target.dtype).removeprefix("torch.")
        if collective.reduces:
            operation = _OPS.get(op) if isinstance(op, str) else None
            if operation is None or not reducible(target.dtype, operation) or prepares(target.dtype, operation):
                return Status.UNSUPPORTED
            check_reducible(operation, target.dtype)
        read = _parts(source, collective.scatters, self._size)
        written = _parts(target, collective.gathers, self._size)
        call = self._call(collective, target, source, operation, root, read, written)
        counts = collective.compared_counts(read, written)
        op_name = None if operation is None else operation.value
        word = word_of(Fingerprint(0, collective.name, op_name, root, dtype, counts, "cpu", NATIVE))
        rows = self._agreement.rows_of(read, written) if collective.pairwise else 0
        if not self._agreement.check(word, deadline, rows):
            return Status.MISMATCH
        self._run(call, deadline)
        if writes and target is not output:
            copy_back(output, target)
        return Status.OK

    def takes(self, tensor: Any, peer: int, tag: int) -> bool:
        """Implement `FastPath`. Always return False: messages need envelopes, so none can use the fast path."""
        return False

    def try_message(self, name: str, tensor: Any, peer: int, tag: int, deadline: float) -> Status:
        """Implement `FastPath`."""
        return Status.UNSUPPORTED

    def _fits(
        self,
        collective: Collective,
        target: torch.Tensor,
        source: torch.Tensor,
        input: torch.Tensor,
        output: torch.Tensor,
    ) -> bool:
        """Return whether source and target match in length, do not overlap, and fit into one MPI call."""
        if collective.in_place:
            return True
        read = source.nbytes
        written = target.nbytes
        if collective.pairwise:
            rows = *input.shape[:1], *output.shape[:1]
            fits = len(rows) == 2 and rows[0] % self._size == 0 == rows[1] % self._size and read == written
        else:
            fits = read == written * self._size if collective.scatters else written == read * self._size
        start = source.data_ptr()
        into = target.data_ptr()
        apart = start + read <= into or into + written <= start
        return fits and apart and in_one_call(max(read, written)) and source.dtype is target.dtype

    def _call(
        self,
        collective: Collective,
        target: torch.Tensor,
        source: torch.Tensor,
        op: ReduceOp | None,
        root: int | None,
        read: list[int],
        written: list[int],
    ) -> Call:
        """Return the call in the form that `run` takes. A list of equally long tensors is passed as one tensor."""
        inputs: tuple[torch.Tensor, ...] = (source,)
        outputs: tuple[torch.Tensor, ...] = (target,)
        packed = None
        if collective.in_place:
            outputs = outputs if collective.receives(self._rank, root or 0) else ()
        elif collective.pairwise:
            inputs = source.view(-1).split(read)
            outputs = target.view(-1).split(written)
        elif collective.gathers:
            outputs = ()
            packed = target
        else:
            inputs = ()
            packed = source
        return Call(collective.family, inputs=inputs, outputs=outputs, op=op, root=root, packed=packed)


def _parts(tensor: torch.Tensor, many: bool, size: int) -> list[int]:
    """Return the number of elements in each part of a tensor."""
    return [tensor.numel() // size] * size if many else [tensor.numel()]
