"""Collectives of tensors whose lengths other ranks need not know: gather_v, scatter_v, all_gather_v, all_to_all_v."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from typing_extensions import Unpack

from unisono.collectives.algorithms import find
from unisono.collectives.arguments import check_rank
from unisono.collectives.plan import Plan
from unisono.collectives.selection import FEWEST_BYTES, NATIVE
from unisono.comm.base import Async, Blocking, CommunicatorBase
from unisono.comm.shape_exchange import ShapeExchange
from unisono.core.buffers import Buffer
from unisono.core.collective import COLLECTIVES
from unisono.core.combined_work import ResultWork
from unisono.core.streams import current_streams, entered
from unisono.core.types import Timeout
from unisono.errors import MismatchError

__all__ = ["UnevenMixin"]


class UnevenMixin(CommunicatorBase):
    """Collective: every rank of the group calls each of these, in the same order. Any dtype.

    Ranks' tensors have at most 16 dimensions, and differ in the first one only. The results are new contiguous tensors.
    """

    @overload
    def all_gather_v(self, tensor: Buffer, **how: Unpack[Blocking]) -> list[torch.Tensor]: ...
    @overload
    def all_gather_v(self, tensor: Buffer, **how: Unpack[Async]) -> ResultWork[list[torch.Tensor]]: ...
    def all_gather_v(
        self,
        tensor: Buffer,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> list[torch.Tensor] | ResultWork[list[torch.Tensor]]:
        """Return the tensors of all ranks, in the order of ranks. No rank needs to know the others' lengths.

        Collective. Cost: as `all_gather`, and before it one of 18 numbers a rank.

        Args:
            tensor: Of at most 16 dimensions, of which the first may differ between ranks.
            algorithm: As for `all_reduce`, of all_gather.
            async_op: Return a work immediately; its `result()` returns the tensors. It owns `tensor` until then.
            timeout: Seconds or a `timedelta`, for each of the two; the communicator's if None.

        Returns: New contiguous tensors, one for each rank; with `async_op`, the `ResultWork` in flight.

        Raises:
            MismatchError: Ranks' tensors differ in dtype, or in another dimension than the first; no data moved.
            ValueError: More than 16 dimensions, or a tensor that cannot be sent.

        Example:
            >>> def program(comm):
            ...     return [t.tolist() for t in comm.all_gather_v(torch.arange(comm.rank))]
            >>> un.launch(program, nprocs=3, backend="thread")[1]
            [[], [0], [0, 1]]
        """
        found: list[torch.Tensor] | ResultWork[list[torch.Tensor]] = self._uneven(
            "all_gather_v", tensor, None, algorithm, async_op, timeout
        )
        return found

    @overload
    def gather_v(self, tensor: Buffer, dst: int = ..., **how: Unpack[Blocking]) -> list[torch.Tensor] | None: ...
    @overload
    def gather_v(
        self, tensor: Buffer, dst: int = ..., **how: Unpack[Async]
    ) -> ResultWork[list[torch.Tensor] | None]: ...
    def gather_v(
        self,
        tensor: Buffer,
        dst: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> list[torch.Tensor] | ResultWork[list[torch.Tensor] | None] | None:
        """Return the tensors of all ranks, in the order of ranks, on rank `dst`; None on the other ranks.

        Collective. Cost: as `gather`, and before it an all_gather of 18 numbers a rank.

        Args:
            tensor: Of at most 16 dimensions, of which the first may differ between ranks.
            dst: The rank that receives.
            algorithm: As for `all_reduce`, of gather.
            async_op, timeout: As in `all_gather_v`.

        Returns: On rank `dst` new contiguous tensors, one for each rank; with `async_op`, the `ResultWork` in flight.

        Raises:
            MismatchError, ValueError: As `all_gather_v`; also where ranks differ in `dst`.

        Example:
            >>> def program(comm):
            ...     found = comm.gather_v(torch.arange(comm.rank), dst=1)
            ...     return found and [t.tolist() for t in found]
            >>> un.launch(program, nprocs=3, backend="thread")
            [None, [[], [0], [0, 1]], None]
        """
        found: list[torch.Tensor] | ResultWork[list[torch.Tensor] | None] | None = self._uneven(
            "gather_v", tensor, dst, algorithm, async_op, timeout
        )
        return found

    @overload
    def scatter_v(
        self, tensors: Sequence[Buffer] | None = ..., src: int = ..., **how: Unpack[Blocking]
    ) -> torch.Tensor: ...
    @overload
    def scatter_v(
        self, tensors: Sequence[Buffer] | None = ..., src: int = ..., **how: Unpack[Async]
    ) -> ResultWork[torch.Tensor]: ...
    def scatter_v(
        self,
        tensors: Sequence[Buffer] | None = None,
        src: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> torch.Tensor | ResultWork[torch.Tensor]:
        """Return tensor r of rank `src`'s list on rank r, which need not know its shape or dtype.

        Collective. Cost: as `scatter`, and before it a broadcast of 18 numbers a rank.

        Args:
            tensors: On rank `src`, one tensor a rank, of at most 16 dimensions, alike but for the first one; else None.
            src: The rank that sends.
            algorithm: As for `all_reduce`, of scatter.
            async_op, timeout: As in `all_gather_v`.

        Returns: A new contiguous tensor, on the communicator's device; with `async_op`, the `ResultWork` in flight.

        Raises:
            MismatchError: Ranks differ in `src` or algorithm; no data moved.
            TypeError, ValueError: Rank `src` has no list, or one that cannot be sent: on every rank; no data moved.

        Example:
            >>> def program(comm):
            ...     return comm.scatter_v([torch.arange(r) for r in range(3)] if comm.rank == 0 else None).tolist()
            >>> un.launch(program, nprocs=3, backend="thread")
            [[], [0], [0, 1]]
        """
        found: torch.Tensor | ResultWork[torch.Tensor] = self._uneven(
            "scatter_v", tensors, src, algorithm, async_op, timeout
        )
        return found

    @overload
    def all_to_all_v(self, tensors: Sequence[Buffer], **how: Unpack[Blocking]) -> list[torch.Tensor]: ...
    @overload
    def all_to_all_v(self, tensors: Sequence[Buffer], **how: Unpack[Async]) -> ResultWork[list[torch.Tensor]]: ...
    def all_to_all_v(
        self,
        tensors: Sequence[Buffer],
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> list[torch.Tensor] | ResultWork[list[torch.Tensor]]:
        """Return what each rank has for this one, in the order of ranks: `tensors[r]` of rank s is entry s on rank r.

        Collective. Cost: as `all_to_all`, and before it one of 18 numbers for each rank.

        Args:
            tensors: One tensor a rank, of at most 16 dimensions, of which the first may differ between all of them.
            algorithm: As for `all_reduce`, of all_to_all.
            async_op, timeout: As in `all_gather_v`.

        Returns: New contiguous tensors, one for each rank; with `async_op`, the `ResultWork` in flight.

        Raises:
            MismatchError, ValueError: As `all_gather_v`.

        Example:
            >>> def program(comm):
            ...     return [t.tolist() for t in comm.all_to_all_v([torch.full((r,), comm.rank) for r in range(3)])]
            >>> un.launch(program, nprocs=3, backend="thread")
            [[[], [], []], [[0], [1], [2]], [[0, 0], [1, 1], [2, 2]]]
        """
        found: list[torch.Tensor] | ResultWork[list[torch.Tensor]] = self._uneven(
            "all_to_all_v", tensors, None, algorithm, async_op, timeout
        )
        return found

    def _uneven(
        self,
        name: str,
        tensors: Buffer | Sequence[Buffer] | None,
        root: int | None,
        algorithm: str | None,
        async_op: bool,
        timeout: Timeout | None,
    ) -> Any:
        """Exchange shapes, allocate the output, and move the data. A blocking call may take the fast path for both."""
        engine, what = self._engine, COLLECTIVES[name]
        engine.enter(name)
        if what.root is not None:
            check_rank(root, what.root, self.size)
        if algorithm not in (None, NATIVE, FEWEST_BYTES):
            find(what.family, algorithm)
        exchange = ShapeExchange(what, root, self.rank, self.size, engine.transport.devices)
        exchange.give(tensors, engine.options.device)
        first = exchange.header, exchange.table, exchange.mine, None, root
        if async_op:
            staging, streams = engine.staging(), current_streams([exchange.device])

            def follow() -> Plan:
                with entered(streams):
                    exchange.allocate()
                    second = what, exchange.output, exchange.input, None, root
                    return engine.plan(*second, lengths=exchange.lengths, staging=staging).ordered()

            work = engine.general_collective(*first, algorithm, True, timeout, follow=follow)
            assert work is not None
            return ResultWork(work, lambda: exchange.output)
        engine.collective(*first, None, False, timeout)
        try:
            exchange.allocate()
        except MismatchError as error:
            raise engine.report_failure(error, name) from None
        except (TypeError, ValueError):
            engine.skip()
            raise
        second = what, exchange.output, exchange.input, None, root, algorithm, False, timeout
        if exchange.lengths:
            engine.general_collective(*second, lengths=exchange.lengths)
        else:
            engine.collective(*second)
        return exchange.output
