"""Collectives that move data from one rank or to one: broadcast, scatter, gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from typing_extensions import Unpack

from unisono.comm.base import Async, Blocking, CommunicatorBase
from unisono.core.buffers import Buffer
from unisono.core.collective import COLLECTIVES
from unisono.core.types import Timeout, Work

__all__ = ["RootedMixin"]

_BROADCAST, _GATHER, _SCATTER = COLLECTIVES["broadcast"], COLLECTIVES["gather"], COLLECTIVES["scatter"]


class RootedMixin(CommunicatorBase):
    """Collective: every rank of the group calls each of these, in the same order. Any dtype."""

    @overload
    def broadcast(self, tensor: Buffer, src: int, **how: Unpack[Blocking]) -> None: ...
    @overload
    def broadcast(self, tensor: Buffer, src: int, **how: Unpack[Async]) -> Work: ...
    def broadcast(
        self,
        tensor: Buffer,
        src: int,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Replace every rank's tensor by rank `src`'s.

        Collective. In place. Errors as `all_reduce`.

        Args:
            tensor: Any shape and strides, with as many elements of the same dtype on every rank.
            src: The rank whose tensor is sent.
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Cost: ceil(log2 p) rounds.

        Example:
            >>> def program(comm):
            ...     t = torch.tensor([comm.rank])
            ...     comm.broadcast(t, src=1)
            ...     return t.item()
            >>> un.launch(program, nprocs=3, backend="thread")
            [1, 1, 1]
        """
        return self._engine.collective(_BROADCAST, tensor, None, None, src, algorithm, async_op, timeout)

    @overload
    def scatter(
        self, tensor: Buffer, scatter_list: Sequence[Buffer] | None, src: int, **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def scatter(
        self, tensor: Buffer, scatter_list: Sequence[Buffer] | None, src: int, **how: Unpack[Async]
    ) -> Work: ...
    def scatter(
        self,
        tensor: Buffer,
        scatter_list: Sequence[Buffer] | None = None,
        src: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Receive `scatter_list[r]` of rank `src` into `tensor` on rank r; the other ranks pass no list.

        Collective.

        Args:
            tensor: Any shape and strides, with as many elements on every rank.
            scatter_list: On rank `src`, one tensor a rank, each with as many elements, of the same dtype; else None.
            src: The rank that sends.
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Cost: ceil(log2 p) rounds.

        Example:
            >>> def program(comm):
            ...     t = torch.zeros(1)
            ...     comm.scatter(t, [torch.tensor([float(r)]) for r in range(3)] if comm.rank == 0 else None)
            ...     return t.item()
            >>> un.launch(program, nprocs=3, backend="thread")
            [0.0, 1.0, 2.0]
        """
        return self._engine.collective(_SCATTER, tensor, scatter_list, None, src, algorithm, async_op, timeout)

    @overload
    def gather(
        self, tensor: Buffer, gather_list: Sequence[Buffer] | None, dst: int, **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def gather(self, tensor: Buffer, gather_list: Sequence[Buffer] | None, dst: int, **how: Unpack[Async]) -> Work: ...
    def gather(
        self,
        tensor: Buffer,
        gather_list: Sequence[Buffer] | None = None,
        dst: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Receive the tensor of rank r into `gather_list[r]` on rank `dst`; the other ranks pass no list.

        Collective.

        Args:
            tensor: Any shape and strides, with as many elements on every rank.
            gather_list: On rank `dst`, one tensor a rank, each with as many elements, of the same dtype; else None.
            dst: The rank that receives.
            algorithm, async_op, timeout: As in `all_reduce`.

        Returns: As `all_reduce`.

        Cost: ceil(log2 p) rounds.

        Example:
            >>> def program(comm):
            ...     out = [torch.zeros(1) for _ in range(3)] if comm.rank == 2 else None
            ...     comm.gather(torch.tensor([float(comm.rank)]), out, dst=2)
            ...     return out and [t.item() for t in out]
            >>> un.launch(program, nprocs=3, backend="thread")
            [None, None, [0.0, 1.0, 2.0]]
        """
        return self._engine.collective(_GATHER, gather_list, tensor, None, dst, algorithm, async_op, timeout)
