"""Collectives in which every rank sends and receives: all_gather, all_to_all, and their single-tensor forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from typing_extensions import Unpack

from unisono.comm.base import Async, Blocking, CommunicatorBase
from unisono.core.collective import COLLECTIVES
from unisono.core.types import Timeout, Work
from unisono.errors import MismatchError

__all__ = ["ExchangeMixin"]

_ALL_GATHER, _ALL_GATHER_SINGLE = COLLECTIVES["all_gather"], COLLECTIVES["all_gather_single"]
_ALL_GATHER_V = COLLECTIVES["all_gather_v"]
_ALL_TO_ALL, _ALL_TO_ALL_SINGLE = COLLECTIVES["all_to_all"], COLLECTIVES["all_to_all_single"]
_MOST_DIMENSIONS = 16


class ExchangeMixin(CommunicatorBase):
    """Collective: every rank of the group calls each of these, in the same order. Any dtype."""

    @overload
    def all_gather(
        self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_gather(self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, **how: Unpack[Async]) -> Work: ...
    def all_gather(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
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
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, **how: Unpack[Blocking]) -> None: ...
    @overload
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, **how: Unpack[Async]) -> Work: ...
    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
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

    def all_gather_v(
        self, tensor: torch.Tensor, *, algorithm: str | None = None, timeout: Timeout | None = None
    ) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in the order of ranks. No rank needs to know the others' lengths.

        Collective. Blocking. Cost: as `all_gather`, and before it one of 17 numbers a rank.

        Args:
            tensor: Of at most 16 dimensions, of which the first may differ between ranks.
            algorithm: As for `all_reduce`, of all_gather.
            timeout: Seconds or a `timedelta`, for each of the two; the communicator's if None.

        Returns:
            New contiguous tensors, one for each rank.

        Raises:
            MismatchError: Ranks' tensors differ in dtype, or in another dimension than the first.
            ValueError: More than 16 dimensions, or a tensor that cannot be sent.

        Example:
            >>> def program(comm):
            ...     return [t.tolist() for t in comm.all_gather_v(torch.arange(comm.rank))]
            >>> un.launch(program, nprocs=3, backend="thread")[1]
            [[], [0], [0, 1]]
        """
        engine, what = self._engine, _ALL_GATHER_V
        engine.enter(what.name)
        self._check_tensor(tensor, "the tensor")
        if tensor.dim() > _MOST_DIMENSIONS:
            raise ValueError(f"the tensor has {tensor.dim()} dimensions; at most {_MOST_DIMENSIONS} can be gathered")
        padding = [0] * (_MOST_DIMENSIONS - tensor.dim())
        mine = torch.tensor([tensor.dim(), *tensor.shape, *padding], device=tensor.device)
        table = mine.new_empty(self.size, mine.numel())
        engine.collective(what, table.unbind(), mine, None, None, algorithm, False, timeout)
        shapes = [torch.Size(row[1 : 1 + row[0]]) for row in table.tolist()]
        if len({(len(shape), shape[1:]) for shape in shapes}) > 1:
            quoted = ", ".join(f"{tuple(shape)} on rank {rank}" for rank, shape in enumerate(shapes))
            error = MismatchError(
                f"ranks' tensors may differ in their first dimension only: {quoted}. Nothing was sent"
            )
            raise engine.report_failure(error, what.name)
        found = [tensor.new_empty(shape) for shape in shapes]
        engine.collective(what, found, tensor, None, None, algorithm, False, timeout)
        return found

    @overload
    def all_to_all(
        self, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor], **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_to_all(
        self, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor], **how: Unpack[Async]
    ) -> Work: ...
    def all_to_all(
        self,
        output_list: Sequence[torch.Tensor],
        input_list: Sequence[torch.Tensor],
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
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        **how: Unpack[Blocking],
    ) -> None: ...
    @overload
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        **how: Unpack[Async],
    ) -> Work: ...
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
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
