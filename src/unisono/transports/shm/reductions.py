"""Reductions in shared memory, as rounds: each rank stages its part, all arrive, each reads what it needs.

Each rank has two staging buffers, used in turn, so that one wait per round is enough. For short messages
each rank reads the data of all ranks (one shot); for long ones each rank reduces its share of a
tile, which the others then copy (two shots). Contributions are combined in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from unisono.core.reduce_op import combine_all, divide
from unisono.core.types import CollectiveCall, ReduceOp
from unisono.transports.shm.barrier import SharedBarrier
from unisono.transports.shm.signature import Signature
from unisono.transports.shm.symmetric_memory import SymmetricMemory

__all__ = ["Reductions", "root_of"]

_MOST_VIEWS = 256
_IN_PLACE_BYTES = 64 << 10
"""Once symmetric memory was allocated, reducing other tensors of at least this size costs one more round."""
_AVERAGES = 1 << 63
"""Flag of the payload: this rank's call expects the average in memory, and does not divide the sum itself."""


class Reductions:
    """Reductions of one group, and the building blocks of its other collectives.

    Args:
        barrier: The barrier of the ranks.
        stages: For each rank its two staging buffers, as bytes, of equal length.
        symmetric: Memory that is reduced in place.
        differ: Called when ranks' signatures differ; raises.
    """

    def __init__(
        self,
        barrier: SharedBarrier,
        stages: Sequence[tuple[torch.Tensor, torch.Tensor]],
        symmetric: SymmetricMemory,
        differ: Callable[[], None],
    ) -> None:
        self._barrier, self.stages, self._symmetric, self._raise_mismatch = barrier, stages, symmetric, differ
        self.rank, self.size = barrier.rank, barrier.size
        self.stage_bytes = stages[0][0].numel()
        self.one_shot_bytes = min(self.stage_bytes, (1 << 20) if self.size <= 2 else (128 << 10))
        self._views: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}
        self._share_views: dict[tuple[int, torch.dtype, int], list[list[torch.Tensor]]] = {}

    # -- building blocks -----------------------------------------------------------------------
    def first(self, signature: Signature, deadline: float) -> None:
        """Arrive in the first round of a call, and compare what all ranks are about to do."""
        if self._barrier.arrive_and_wait(deadline, signature):
            self._raise_mismatch()

    def _next_stage(self) -> int:
        return (self._barrier.round + 1) & 1

    def views(self, index: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """The first `count` elements of every rank's staging buffer."""
        key = (index, dtype, count)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            # A call in inference mode must not leave views behind that only inference mode may write to.
            with torch.inference_mode(mode=False):
                views = self._views[key] = [stage[index][: count * dtype.itemsize].view(dtype) for stage in self.stages]
        return views

    # -- reductions ----------------------------------------------------------------------------
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, signature: Signature, deadline: float) -> None:
        """Reduce in place. Traffic, in operands: 3p-1 for short messages, at most 7-5/p for long ones.

        If the tensors of all ranks are at the same offset in symmetric memory, nothing is staged. The rank that sums
        a share there also divides it for an average, unless any rank passed a sum that it divides itself. In all
        other cases each rank divides.
        """
        if self.size > 1 and not self._all_reduced(tensor, op, signature, deadline) and op is ReduceOp.AVG:
            divide(tensor, self.size)

    def _all_reduced(self, tensor: torch.Tensor, op: ReduceOp, signature: Signature, deadline: float) -> bool:
        """Combine by the suitable algorithm. Return whether that was in place, and so has divided already."""
        short = tensor.nbytes <= self.one_shot_bytes
        if short and not self.may_be_symmetric(tensor.nbytes):
            self._one_shot(tensor, op, signature, deadline)
            return False
        tile = self.stage_bytes // tensor.element_size()
        offset = self._symmetric.offset(tensor)
        if not offset and not short:
            self._stage_shares(tensor[:tile])
        payload = offset | _AVERAGES if op is ReduceOp.AVG else offset
        self.first((*signature[:3], payload), deadline)
        payloads = self._barrier.payloads()
        alike = payloads.count(payload) == self.size
        if offset and (alike or all(other & ~_AVERAGES == offset for other in payloads)):
            self._symmetric.reduce(offset, tensor, op if alike else ReduceOp.SUM)
            self._barrier.reduce_barrier(deadline)
            return alike
        if short:
            self._one_shot(tensor, op, None, deadline)
            return False
        start = 0
        if not any(other & ~_AVERAGES for other in payloads):
            self._reduce_share(tensor[:tile], op, deadline, to_all=True)
            start = tile
        # If only some ranks use symmetric memory, all use the staging buffers, from the beginning.
        self._two_shot(tensor[start:], op, deadline, to_all=True)
        return False

    def may_be_symmetric(self, nbytes: int) -> bool:
        """Return whether a call of this length compares the offsets of tensors; the same answer on all ranks."""
        return nbytes > self.one_shot_bytes or (nbytes >= _IN_PLACE_BYTES and self._symmetric.allocations > 0)

    def _one_shot(self, tensor: torch.Tensor, op: ReduceOp, signature: Signature | None, deadline: float) -> None:
        views = self.views(self._next_stage(), tensor.dtype, tensor.numel())
        views[self.rank].copy_(tensor)
        self._arrive(signature, deadline)
        combine_all(op, views, tensor)

    def _two_shot(self, tensor: torch.Tensor, op: ReduceOp, deadline: float, *, to_all: bool) -> None:
        tile = self.stage_bytes // tensor.element_size()
        for start in range(0, tensor.numel(), tile):
            part = tensor[start : start + tile]
            self._stage_shares(part)
            self._barrier.arrive_and_wait(deadline)
            self._reduce_share(part, op, deadline, to_all=to_all)

    def _shares(self, index: int, dtype: torch.dtype, count: int) -> list[list[torch.Tensor]]:
        """For each rank's staging buffer, each rank's share of a tile of `count` elements there."""
        key = (index, dtype, count)
        found = self._share_views.get(key)
        if found is None:
            if len(self._share_views) >= _MOST_VIEWS:
                self._share_views.clear()
            edges = [r * count // self.size for r in range(self.size + 1)]
            sizes = [high - low for low, high in pairwise(edges)]
            with torch.inference_mode(mode=False):
                found = self._share_views[key] = [list(view.split(sizes)) for view in self.views(index, dtype, count)]
        return found

    def _stage_shares(self, tile: torch.Tensor) -> None:
        """Stage a tile for the next round: all but this rank's share, which is read in place."""
        shares = self._shares(self._next_stage(), tile.dtype, tile.numel())
        for r, part in enumerate(tile.split([view.numel() for view in shares[self.rank]])):
            if r != self.rank:
                shares[self.rank][r].copy_(part)

    def _reduce_share(self, tile: torch.Tensor, op: ReduceOp, deadline: float, *, to_all: bool) -> None:
        """Reduce this rank's share of the tile that all ranks have staged, and copy the shares of the others."""
        shares = self._shares(self._barrier.round & 1, tile.dtype, tile.numel())
        parts = tile.split([view.numel() for view in shares[self.rank]])
        own, mine = parts[self.rank], shares[self.rank][self.rank]
        contributions = [own if r == self.rank else shares[r][self.rank] for r in range(self.size)]
        combine_all(op, contributions, mine)
        self._barrier.reduce_barrier(deadline)
        if to_all:
            for r, part in enumerate(parts):
                part.copy_(shares[r][r])

    def reduce(self, call: CollectiveCall, signature: Signature, deadline: float) -> None:
        """Reduce on the root alone if the message is short or there are two ranks; otherwise as a long `all_reduce`."""
        tensor, op, is_root = call.inputs[0], call.op or ReduceOp.SUM, self.rank == root_of(call)
        tile = self.stage_bytes // tensor.element_size()
        if self.size == 1:
            return
        if self.size == 2 or tensor.nbytes <= self.one_shot_bytes:
            for start in range(0, max(1, tensor.numel()), tile):
                self._reduce_at_root(
                    tensor[start : start + tile], op, signature if start == 0 else None, deadline, is_root=is_root
                )
        else:
            self._stage_shares(tensor[:tile])
            self.first(signature, deadline)
            self._reduce_share(tensor[:tile], op, deadline, to_all=is_root)
            self._two_shot(tensor[tile:], op, deadline, to_all=is_root)

    def _reduce_at_root(
        self, tensor: torch.Tensor, op: ReduceOp, signature: Signature | None, deadline: float, *, is_root: bool
    ) -> None:
        """Stage the part on all ranks, and reduce it on one."""
        views = self.views(self._next_stage(), tensor.dtype, tensor.numel())
        views[self.rank].copy_(tensor)
        self._arrive(signature, deadline)
        if is_root:
            combine_all(op, views, tensor)

    def reduce_scatter(self, call: CollectiveCall, signature: Signature, deadline: float) -> None:
        """Sum the pieces that all ranks staged for this one. Each tile has an equal piece for every rank."""
        inputs, target, op = call.inputs, call.outputs[0], call.op or ReduceOp.SUM
        piece = self.piece(target.element_size())
        for start in range(0, max(1, *(t.numel() for t in inputs)), piece):
            views = self.views(self._next_stage(), target.dtype, piece * self.size)
            for r, tensor in enumerate(inputs):
                part = tensor[start : start + piece]
                if r != self.rank and part.numel():
                    views[self.rank][r * piece : r * piece + part.numel()].copy_(part)
            self._arrive(signature if start == 0 else None, deadline)
            total = target[start : start + piece]
            if total.numel():
                low = self.rank * piece
                own = inputs[self.rank][start : start + piece]
                shares = [own if r == self.rank else views[r][low : low + total.numel()] for r in range(self.size)]
                combine_all(op, shares, total)

    def _arrive(self, signature: Signature | None, deadline: float) -> None:
        """Arrive in the first round of a call, with its signature, or in a later round, without."""
        if signature is None:
            self._barrier.arrive_and_wait(deadline)
        else:
            self.first(signature, deadline)

    def piece(self, element_size: int) -> int:
        """Return the number of elements per rank that fit into a staging buffer."""
        return max(1, self.stage_bytes // self.size // element_size)


def root_of(call: CollectiveCall) -> int:
    """Return the root of a call that has one."""
    assert call.root is not None
    return call.root
