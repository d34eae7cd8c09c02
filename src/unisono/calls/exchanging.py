"""Collectives in which every rank gives and takes: all_gather, all_to_all, and their single-tensor forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from typing_extensions import Unpack

from unisono.calls.caller import Async, Blocking, Caller
from unisono.collectives.description import COLLECTIVES
from unisono.types import Work

__all__ = ["Exchanging"]

_ALL_GATHER, _ALL_GATHER_SINGLE = COLLECTIVES["all_gather"], COLLECTIVES["all_gather_single"]
_ALL_TO_ALL, _ALL_TO_ALL_SINGLE = COLLECTIVES["all_to_all"], COLLECTIVES["all_to_all_single"]


class Exchanging(Caller):
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
        timeout: float | None = None,
    ) -> Work | None:
        """`tensor_list[r]` on every rank becomes the tensor of rank r.

        Collective. Ranks' tensors may differ in length, as all ranks' lists do alike.
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
        timeout: float | None = None,
    ) -> Work | None:
        """As `all_gather`, into one tensor of p times `input`'s elements, rank 0's first."""
        return self._engine.collective(_ALL_GATHER_SINGLE, output, input, None, None, algorithm, async_op, timeout)

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
        timeout: float | None = None,
    ) -> Work | None:
        """`output_list[s]` on rank r becomes `input_list[r]` of rank s.

        Collective. Lengths are free, as long as both ends of each pair agree.
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
        timeout: float | None = None,
    ) -> Work | None:
        """As `all_to_all`, with rows of one tensor: split along dimension 0, evenly or as the sizes say."""
        what, splits = _ALL_TO_ALL_SINGLE, (output_split_sizes, input_split_sizes)
        if splits == (None, None):
            return self._engine.collective(what, output, input, None, None, algorithm, async_op, timeout)
        return self._engine.general_collective(what, output, input, None, None, algorithm, async_op, timeout, splits)
