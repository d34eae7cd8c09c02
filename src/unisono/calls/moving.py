"""Collectives that move data from one rank or to one: broadcast, scatter, gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from typing_extensions import Unpack

from unisono import plan as plans
from unisono.calls.caller import Async, Blocking, Caller, others
from unisono.tensors import check_apart
from unisono.types import Work

__all__ = ["Moving"]


class Moving(Caller):
    """Collective: every rank of the group calls each of these, in the same order. Any dtype."""

    @overload
    def broadcast(self, tensor: torch.Tensor, src: int, **how: Unpack[Blocking]) -> None: ...
    @overload
    def broadcast(self, tensor: torch.Tensor, src: int, **how: Unpack[Async]) -> Work: ...
    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Every rank's tensor becomes rank `src`'s.

        Collective. In place. n elements on every rank. Cost: ceil(log2 p) rounds. Errors as `all_reduce`.

        Example:
            >>> def program(comm):
            ...     t = torch.tensor([comm.rank])
            ...     comm.broadcast(t, src=1)
            ...     return t.item()
            >>> un.launch(program, nprocs=3, backend="thread")
            [1, 1, 1]
        """
        if algorithm is None and not async_op and self._engine.quickly("broadcast", tensor, None, "", src, timeout):
            return None
        self._enter("broadcast")
        self._check_rank(src, "src")
        self._check_tensor(tensor, "the tensor", written=self.rank != src)
        plan = plans.broadcast(self._staging(), tensor, src, self.rank)
        return self._engine.run(plan, "broadcast", algorithm, async_op, timeout)

    @overload
    def scatter(
        self, tensor: torch.Tensor, scatter_list: Sequence[torch.Tensor] | None, src: int, **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def scatter(
        self, tensor: torch.Tensor, scatter_list: Sequence[torch.Tensor] | None, src: int, **how: Unpack[Async]
    ) -> Work: ...
    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Sequence[torch.Tensor] | None = None,
        src: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """`tensor` on rank r becomes `scatter_list[r]` of rank `src`; the others give no list.

        Collective. n elements on every rank and in every entry. Cost: ceil(log2 p) rounds.

        Example:
            >>> def program(comm):
            ...     t = torch.zeros(1)
            ...     comm.scatter(t, [torch.tensor([float(r)]) for r in range(3)] if comm.rank == 0 else None)
            ...     return t.item()
            >>> un.launch(program, nprocs=3, backend="thread")
            [0.0, 1.0, 2.0]
        """
        if (
            algorithm is None
            and not async_op
            and self._engine.quickly("scatter", tensor, scatter_list, "", src, timeout)
        ):
            return None
        self._enter("scatter")
        self._check_rank(src, "src")
        self._check_tensor(tensor, "the tensor", written=True)
        parts = self._rooted_list(scatter_list, "scatter_list", src, tensor)
        check_apart([("the tensor", tensor)], others(parts, "scatter_list", self.rank, tensor))
        plan = plans.scatter(self._staging(), tensor, parts, src, self.rank, self.size)
        return self._engine.run(plan, "scatter", algorithm, async_op, timeout)

    @overload
    def gather(
        self, tensor: torch.Tensor, gather_list: Sequence[torch.Tensor] | None, dst: int, **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def gather(
        self, tensor: torch.Tensor, gather_list: Sequence[torch.Tensor] | None, dst: int, **how: Unpack[Async]
    ) -> Work: ...
    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Sequence[torch.Tensor] | None = None,
        dst: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """`gather_list[r]` on rank `dst` becomes the tensor of rank r; the others give no list.

        Collective. n elements on every rank and in every entry. Cost: ceil(log2 p) rounds.

        Example:
            >>> def program(comm):
            ...     out = [torch.zeros(1) for _ in range(3)] if comm.rank == 2 else None
            ...     comm.gather(torch.tensor([float(comm.rank)]), out, dst=2)
            ...     return out and [t.item() for t in out]
            >>> un.launch(program, nprocs=3, backend="thread")
            [None, None, [0.0, 1.0, 2.0]]
        """
        if algorithm is None and not async_op and self._engine.quickly("gather", gather_list, tensor, "", dst, timeout):
            return None
        self._enter("gather")
        self._check_rank(dst, "dst")
        self._check_tensor(tensor, "the tensor")
        parts = self._rooted_list(gather_list, "gather_list", dst, tensor, written=True)
        self._check_targets(parts, "gather_list", tensor)
        plan = plans.gather(self._staging(), tensor, parts, dst, self.rank, self.size)
        return self._engine.run(plan, "gather", algorithm, async_op, timeout)

    def _rooted_list(
        self,
        tensors: Sequence[torch.Tensor] | None,
        name: str,
        root: int,
        like: torch.Tensor,
        *,
        written: bool = False,
    ) -> Sequence[torch.Tensor]:
        """The list that only the root gives: one tensor a rank, as long as `like`."""
        if self.rank != root:
            if tensors:
                raise ValueError(f"{name} is for rank {root} alone; pass None on the others")
            return ()
        if tensors is None:
            raise ValueError(f"{name} must be given on rank {root}, one tensor a rank")
        self._check_list(tensors, name, like, written=written)
        for index, tensor in enumerate(tensors):
            if tensor.numel() != like.numel():
                raise ValueError(
                    f"{name}[{index}] has {tensor.numel()} elements, but the tensor has {like.numel()}; "
                    "all must have as many"
                )
        return tensors
