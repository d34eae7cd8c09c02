"""Collectives in which every rank sends and receives: all_gather, all_to_all, and their single-tensor forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from typing_extensions import Unpack

from unisono.comm.base import Async, Blocking, CommunicatorBase
from unisono.core.buffers import Buffer
from unisono.core.collective import COLLECTIVES
from unisono.core.types import Timeout, Work

__all__ = ["ExchangeMixin"]

_ALL_GATHER, _ALL_GATHER_SINGLE = COLLECTIVES["all_gather"], COLLECTIVES["all_gather_single"]
_ALL_TO_ALL, _ALL_TO_ALL_SINGLE = COLLECTIVES["all_to_all"], COLLECTIVES["all_to_all_single"]


class ExchangeMixin(CommunicatorBase):
    """Collective: every rank of the group calls each of these, in the same order. Any dtype."""

    @overload
    def all_gather(self, tensor_list: Sequence[Buffer], tensor: Buffer, **how: Unpack[Blocking]) -> None: ...
    @overload
    def all_gather(self, tensor_list: Sequence[Buffer], tensor: Buffer, **how: Unpack[Async]) -> Work: ...
    def all_gather(
        self,
        tensor_list: Sequence[Buffer],
        tensor: Buffer,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Receive the tensor of rank r into `tensor_list[r]` on every rank.

        Collective. Ranks' tensors may differ in length, as all ranks' lists do alike.

        Args:
            tensor_list: One tensor a rank, of any shape and strides; entry r has as many elements as rank r's tensor.
            tensor: This rank's tensor, of the same dtype.
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Cost: (p-1)/p of the list's bytes sent by each rank.

        Example:
            >>> def program(comm):
            ...     out = [torch.zeros(r + 1) for r in range(comm.size)]
            ...     comm.all_gather(out, torch.full((comm.rank + 1,), float(comm.rank)))
            ...     return [t.tolist() for t in out]
            >>> un.launch(program, nprocs=2, backend="thread")[0]
            [[0.0], [1.0, 1.0]]
        """
        return self._engine.collective(_ALL_GATHER, tensor_list, tensor, None, None, algorithm, async_op, timeout)

    @overload
    def all_gather_single(self, output: Buffer, input: Buffer, **how: Unpack[Blocking]) -> None: ...
    @overload
    def all_gather_single(self, output: Buffer, input: Buffer, **how: Unpack[Async]) -> Work: ...
    def all_gather_single(
        self,
        output: Buffer,
        input: Buffer,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Receive the tensors of all ranks into one tensor, rank 0's first. Otherwise as `all_gather`.

        Args:
            output: Any shape and strides, with p times as many elements as `input`, and of its dtype.
            input: This rank's tensor: any shape and strides, as many elements on every rank.
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Example:
            >>> def program(comm):
            ...     out = torch.zeros(2, 2)
            ...     comm.all_gather_single(out, torch.tensor([1.0, 2.0]) + 10 * comm.rank)
            ...     return out.tolist()
            >>> un.launch(program, nprocs=2, backend="thread")[0]
            [[1.0, 2.0], [11.0, 12.0]]
        """
        return self._engine.collective(_ALL_GATHER_SINGLE, output, input, None, None, algorithm, async_op, timeout)

    @overload
    def all_to_all(
        self, output_list: Sequence[Buffer], input_list: Sequence[Buffer], **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_to_all(self, output_list: Sequence[Buffer], input_list: Sequence[Buffer], **how: Unpack[Async]) -> Work: ...
    def all_to_all(
        self,
        output_list: Sequence[Buffer],
        input_list: Sequence[Buffer],
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Receive `input_list[r]` of rank s into `output_list[s]` on rank r.

        Collective. Lengths are free, as long as both ends of each pair agree.

        Args:
            output_list: One tensor a rank, of any shape and strides; entry s has as many elements as rank s sends here.
            input_list: One tensor a rank, of the same dtype; entry r is sent to rank r.
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Cost: (p-1)/p of the inputs' bytes sent by each rank.

        Example:
            >>> def program(comm):
            ...     out = [torch.zeros(1) for _ in range(comm.size)]
            ...     comm.all_to_all(out, [torch.tensor([10.0 * comm.rank + r]) for r in range(comm.size)])
            ...     return [t.item() for t in out]
            >>> un.launch(program, nprocs=2, backend="thread")
            [[0.0, 10.0], [1.0, 11.0]]
        """
        return self._engine.collective(_ALL_TO_ALL, output_list, input_list, None, None, algorithm, async_op, timeout)

    @overload
    def all_to_all_single(
        self,
        output: Buffer,
        input: Buffer,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        **how: Unpack[Blocking],
    ) -> None: ...
    @overload
    def all_to_all_single(
        self,
        output: Buffer,
        input: Buffer,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        **how: Unpack[Async],
    ) -> Work: ...
    def all_to_all_single(
        self,
        output: Buffer,
        input: Buffer,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Exchange rows of one tensor: each rank sends a part of `input` to every rank. Otherwise as `all_to_all`.

        Args:
            output: Any shape with at least one dimension; the rows of rank 0 come first.
            input: Of the same dtype; its first rows are sent to rank 0.
            output_split_sizes: Rows of `output` from each rank; equal parts if None.
            input_split_sizes: Rows of `input` for each rank; equal parts if None.
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Example:
            >>> def program(comm):
            ...     mine, out = torch.arange(3) + 10 * comm.rank, torch.zeros(2 + comm.rank * 2, dtype=torch.int64)
            ...     comm.all_to_all_single(out, mine, [1 + comm.rank] * 2, [1, 2])
            ...     return out.tolist()
            >>> un.launch(program, nprocs=2, backend="thread")
            [[0, 10], [1, 2, 11, 12]]
        """
        what, splits = _ALL_TO_ALL_SINGLE, (output_split_sizes, input_split_sizes)
        if splits == (None, None):
            return self._engine.collective(what, output, input, None, None, algorithm, async_op, timeout)
        return self._engine.general_collective(what, output, input, None, None, algorithm, async_op, timeout, splits)
