"""Collectives that reduce: all_reduce, reduce, reduce_scatter, and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from typing_extensions import Unpack

from unisono.comm.base import Async, Blocking, CommunicatorBase
from unisono.core.buffers import Buffer
from unisono.core.collective import COLLECTIVES
from unisono.core.types import ReduceOp, Timeout, Work

__all__ = ["ReductionMixin"]

_ALL_REDUCE, _BARRIER, _REDUCE = COLLECTIVES["all_reduce"], COLLECTIVES["barrier"], COLLECTIVES["reduce"]
_REDUCE_SCATTER, _REDUCE_SCATTER_SINGLE = COLLECTIVES["reduce_scatter"], COLLECTIVES["reduce_scatter_single"]


class ReductionMixin(CommunicatorBase):
    """Collective: every rank of the group calls each of these, in the same order."""

    @overload
    def all_reduce(self, tensor: Buffer, op: str | ReduceOp = ..., **how: Unpack[Blocking]) -> None: ...
    @overload
    def all_reduce(self, tensor: Buffer, op: str | ReduceOp = ..., **how: Unpack[Async]) -> Work: ...
    def all_reduce(
        self,
        tensor: Buffer,
        op: str | ReduceOp = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Replace every rank's tensor by the sum (or `op`) of all ranks' tensors, bitwise identical on all ranks.

        Collective. In place. Any strided tensor of n elements, n the same on all ranks.

        Args:
            tensor: Of a dtype that torch can reduce by `op`; bool sums are "or".
            op: sum, avg, product, min, max (NaN wins), band, bor or bxor.
            algorithm: "auto" for the least predicted time (see `plan`), a file of
                `unisono.collectives.algorithms.all_reduce` ("ring", "double_binary_tree:segments=8", ...), "native"
                where the backend has it, or None: native, else the fastest by its cost. "fewest_bytes":
                native, else the algorithm that sends least.
            async_op: Return a `Work` immediately; the tensor belongs to it until `wait` returns.
            timeout: Seconds or a `timedelta`; the communicator's if None.

        Returns: None when the call is done; with `async_op`, the `Work` in flight.

        Raises:
            MismatchError: Ranks disagree on operation, op, dtype, n or algorithm; no data moved.
            ValueError: Unsupported by `op`, memory that overlaps itself, an unknown algorithm.
            CommTimeoutError, PeerLostError: See `unisono.errors`; the communicator is broken then.

        Cost: at least ceil(log2 p) rounds and 2(p-1)/p of the bytes sent by each rank.

        Example:
            >>> def program(comm):
            ...     t = torch.tensor([1.0, 2.0]) * (comm.rank + 1)
            ...     comm.all_reduce(t, algorithm="ring")
            ...     return t.tolist()
            >>> un.launch(program, nprocs=4, backend="thread")[3]
            [10.0, 20.0]
        """
        return self._engine.collective(_ALL_REDUCE, tensor, None, op, None, algorithm, async_op, timeout)

    @overload
    def reduce(self, tensor: Buffer, dst: int, op: str | ReduceOp = ..., **how: Unpack[Blocking]) -> None: ...
    @overload
    def reduce(self, tensor: Buffer, dst: int, op: str | ReduceOp = ..., **how: Unpack[Async]) -> Work: ...
    def reduce(
        self,
        tensor: Buffer,
        dst: int,
        op: str | ReduceOp = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Replace rank `dst`'s tensor by the sum (or `op`) of all ranks' tensors; the others stay unchanged.

        Collective. In place on `dst`.

        Args:
            tensor: As for `all_reduce`.
            dst: The rank that gets the result.
            op: As for `all_reduce`.
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Cost: ceil(log2 p) rounds.

        Example:
            >>> def program(comm):
            ...     t = torch.tensor([comm.rank + 1])
            ...     comm.reduce(t, dst=1, op="max")
            ...     return t.item()
            >>> un.launch(program, nprocs=3, backend="thread")
            [1, 3, 3]
        """
        return self._engine.collective(_REDUCE, tensor, None, op, dst, algorithm, async_op, timeout)

    @overload
    def reduce_scatter(
        self,
        output: Buffer,
        input_list: Sequence[Buffer],
        op: str | ReduceOp = ...,
        **how: Unpack[Blocking],
    ) -> None: ...
    @overload
    def reduce_scatter(
        self, output: Buffer, input_list: Sequence[Buffer], op: str | ReduceOp = ..., **how: Unpack[Async]
    ) -> Work: ...
    def reduce_scatter(
        self,
        output: Buffer,
        input_list: Sequence[Buffer],
        op: str | ReduceOp = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Write the sum (or `op`) of every rank's `input_list[r]` to `output` on rank r.

        Collective. Inputs may differ in length, as all ranks' lists do alike; they stay unchanged.

        Args:
            output: Any shape and strides, with as many elements as every rank's input for this rank.
            input_list: One tensor a rank, of the same dtype.
            op: As for `all_reduce`.
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Cost: (p-1)/p of the inputs' bytes sent by each rank, and one copy of the inputs.

        Example:
            >>> def program(comm):
            ...     out = torch.zeros(1)
            ...     comm.reduce_scatter(out, [torch.tensor([10.0 * r]) for r in range(comm.size)])
            ...     return out.item()
            >>> un.launch(program, nprocs=2, backend="thread")
            [0.0, 20.0]
        """
        return self._engine.collective(_REDUCE_SCATTER, output, input_list, op, None, algorithm, async_op, timeout)

    @overload
    def reduce_scatter_single(
        self, output: Buffer, input: Buffer, op: str | ReduceOp = ..., **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def reduce_scatter_single(
        self, output: Buffer, input: Buffer, op: str | ReduceOp = ..., **how: Unpack[Async]
    ) -> Work: ...
    def reduce_scatter_single(
        self,
        output: Buffer,
        input: Buffer,
        op: str | ReduceOp = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Write this rank's part of the sum (or `op`) of every rank's `input` to `output`. Else as `reduce_scatter`.

        Args:
            output: Any shape and strides, with as many elements on every rank.
            input: Of the same dtype, with p times as many elements; the first part is for rank 0.
            op: As for `all_reduce`.
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Example:
            >>> def program(comm):
            ...     out = torch.zeros(2)
            ...     comm.reduce_scatter_single(out, torch.arange(4.0))
            ...     return out.tolist()
            >>> un.launch(program, nprocs=2, backend="thread")
            [[0.0, 2.0], [4.0, 6.0]]
        """
        return self._engine.collective(_REDUCE_SCATTER_SINGLE, output, input, op, None, algorithm, async_op, timeout)

    @overload
    def barrier(self, **how: Unpack[Blocking]) -> None: ...
    @overload
    def barrier(self, **how: Unpack[Async]) -> Work: ...
    def barrier(
        self, *, algorithm: str | None = None, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Wait until every rank has reached the barrier. Collective.

        Args:
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Cost: ceil(log2 p) rounds of one byte.
        """
        return self._engine.collective(_BARRIER, None, None, None, None, algorithm, async_op, timeout)
