"""Reductions in shared memory, as rounds: each rank stages its part, all arrive, each reads what it needs.

Each rank has two stages, used in turn, so that one wait per round is enough. For short messages
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
"""Sent with the place: this rank's call expects the average in memory, and does not divide the sum itself."""


class Reductions:
    """Reductions of one group, and the building blocks of its other collectives.

    Args:
        board: The barrier of the ranks.
        stages: For each rank its two stages, as bytes, of equal length.
        arenas: The memory that is reduced in place.
        differ: Called when ranks' marks differ; raises.
    """

    def __init__(
        self,
        board: SharedBarrier,
        stages: Sequence[tuple[torch.Tensor, torch.Tensor]],
        arenas: SymmetricMemory,
        differ: Callable[[], None],
    ) -> None:
        self._board, self.stages, self._arenas, self._differ = board, stages, arenas, differ
        self.rank, self.size = board.rank, board.size
        self.stage_bytes = stages[0][0].numel()
        self.one_shot_bytes = min(self.stage_bytes, (1 << 20) if self.size <= 2 else (128 << 10))
        self._views: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}
        self._cut: dict[tuple[int, torch.dtype, int], list[list[torch.Tensor]]] = {}

    # -- building blocks -----------------------------------------------------------------------
    def first(self, mark: Signature, deadline: float) -> None:
        """Arrive in the first round of a call, and compare what all ranks are about to do."""
        if self._board.barrier(deadline, mark):
            self._differ()

    def _next_half(self) -> int:
        return (self._board.round + 1) & 1

    def views(self, half: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """The first `count` elements of every rank's stage."""
        key = (half, dtype, count)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            # A call in inference mode must not leave views behind that only inference mode may write to.
            with torch.inference_mode(mode=False):
                views = self._views[key] = [stage[half][: count * dtype.itemsize].view(dtype) for stage in self.stages]
        return views

    # -- reductions ----------------------------------------------------------------------------
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, mark: Signature, deadline: float) -> None:
        """Reduce in place. Traffic, in operands: 3p-1 for short messages, at most 7-5/p for long ones.

        If the tensors of all ranks are at the same place of symmetric memory, nothing is staged. The rank that sums
        a share there also divides it for an average, unless any rank passed a sum that it divides itself. In all
        other cases each rank divides.
        """
        if self.size > 1 and not self._all_reduced(tensor, op, mark, deadline) and op is ReduceOp.AVG:
            divide(tensor, self.size)

    def _all_reduced(self, tensor: torch.Tensor, op: ReduceOp, mark: Signature, deadline: float) -> bool:
        """Combine by the suitable algorithm. Return whether that was in place, and so has divided already."""
        short = tensor.nbytes <= self.one_shot_bytes
        if short and not self.may_be_symmetric(tensor.nbytes):
            self._one_shot(tensor, op, mark, deadline)
            return False
        tile = self.stage_bytes // tensor.element_size()
        place = self._arenas.place(tensor)
        if not place and not short:
            self._lay(tensor[:tile])
        told = place | _AVERAGES if op is ReduceOp.AVG else place
        self.first((*mark[:3], told), deadline)
        extras = self._board.payloads()
        alike = extras.count(told) == self.size
        if place and (alike or all(extra & ~_AVERAGES == place for extra in extras)):
            self._arenas.reduce(place, tensor, op if alike else ReduceOp.SUM)
            self._board.reduce_barrier(deadline)
            return alike
        if short:
            self._one_shot(tensor, op, None, deadline)
            return False
        start = 0
        if not any(extra & ~_AVERAGES for extra in extras):
            self._share(tensor[:tile], op, deadline, everywhere=True)
            start = tile
        # If only some ranks use symmetric memory, all use the stages, from the beginning.
        self._tiles(tensor[start:], op, deadline, everywhere=True)
        return False

    def may_be_symmetric(self, nbytes: int) -> bool:
        """Return whether a call of this length compares the places of tensors; the same answer on all ranks."""
        return nbytes > self.one_shot_bytes or (nbytes >= _IN_PLACE_BYTES and self._arenas.made > 0)

    def _one_shot(self, tensor: torch.Tensor, op: ReduceOp, mark: Signature | None, deadline: float) -> None:
        views = self.views(self._next_half(), tensor.dtype, tensor.numel())
        views[self.rank].copy_(tensor)
        self._arrive(mark, deadline)
        combine_all(op, views, tensor)

    def _tiles(self, tensor: torch.Tensor, op: ReduceOp, deadline: float, *, everywhere: bool) -> None:
        tile = self.stage_bytes // tensor.element_size()
        for start in range(0, tensor.numel(), tile):
            part = tensor[start : start + tile]
            self._lay(part)
            self._board.barrier(deadline)
            self._share(part, op, deadline, everywhere=everywhere)

    def _shares(self, half: int, dtype: torch.dtype, count: int) -> list[list[torch.Tensor]]:
        """For each rank's stage, each rank's share of a tile of `count` elements there."""
        key = (half, dtype, count)
        found = self._cut.get(key)
        if found is None:
            if len(self._cut) >= _MOST_VIEWS:
                self._cut.clear()
            edges = [r * count // self.size for r in range(self.size + 1)]
            sizes = [high - low for low, high in pairwise(edges)]
            with torch.inference_mode(mode=False):
                found = self._cut[key] = [list(view.split(sizes)) for view in self.views(half, dtype, count)]
        return found

    def _lay(self, tile: torch.Tensor) -> None:
        """Stage a tile for the next round: all but this rank's share, which is read in place."""
        shares = self._shares(self._next_half(), tile.dtype, tile.numel())
        for r, part in enumerate(tile.split([view.numel() for view in shares[self.rank]])):
            if r != self.rank:
                shares[self.rank][r].copy_(part)

    def _share(self, tile: torch.Tensor, op: ReduceOp, deadline: float, *, everywhere: bool) -> None:
        """Reduce this rank's share of the tile that all ranks have staged, and copy the shares of the others."""
        shares = self._shares(self._board.round & 1, tile.dtype, tile.numel())
        parts = tile.split([view.numel() for view in shares[self.rank]])
        own, mine = parts[self.rank], shares[self.rank][self.rank]
        given = [own if r == self.rank else shares[r][self.rank] for r in range(self.size)]
        combine_all(op, given, mine)
        self._board.reduce_barrier(deadline)
        if everywhere:
            for r, part in enumerate(parts):
                part.copy_(shares[r][r])

    def reduce(self, call: CollectiveCall, mark: Signature, deadline: float) -> None:
        """Reduce on the root alone if the message is short or there are two ranks; otherwise as a long `all_reduce`."""
        tensor, op, here = call.inputs[0], call.op or ReduceOp.SUM, self.rank == root_of(call)
        tile = self.stage_bytes // tensor.element_size()
        if self.size == 1:
            return
        if self.size == 2 or tensor.nbytes <= self.one_shot_bytes:
            for start in range(0, max(1, tensor.numel()), tile):
                self._reduce_here(tensor[start : start + tile], op, mark if start == 0 else None, deadline, here=here)
        else:
            self._lay(tensor[:tile])
            self.first(mark, deadline)
            self._share(tensor[:tile], op, deadline, everywhere=here)
            self._tiles(tensor[tile:], op, deadline, everywhere=here)

    def _reduce_here(
        self, tensor: torch.Tensor, op: ReduceOp, mark: Signature | None, deadline: float, *, here: bool
    ) -> None:
        """Stage the part on all ranks, and reduce it on one."""
        views = self.views(self._next_half(), tensor.dtype, tensor.numel())
        views[self.rank].copy_(tensor)
        self._arrive(mark, deadline)
        if here:
            combine_all(op, views, tensor)

    def reduce_scatter(self, call: CollectiveCall, mark: Signature, deadline: float) -> None:
        """Sum the pieces that all ranks staged for this one. Each tile has an equal piece for every rank."""
        inputs, target, op = call.inputs, call.outputs[0], call.op or ReduceOp.SUM
        piece = self.piece(target.element_size())
        for start in range(0, max(1, *(t.numel() for t in inputs)), piece):
            views = self.views(self._next_half(), target.dtype, piece * self.size)
            for r, given in enumerate(inputs):
                part = given[start : start + piece]
                if r != self.rank and part.numel():
                    views[self.rank][r * piece : r * piece + part.numel()].copy_(part)
            self._arrive(mark if start == 0 else None, deadline)
            total = target[start : start + piece]
            if total.numel():
                place = self.rank * piece
                own = inputs[self.rank][start : start + piece]
                shares = [own if r == self.rank else views[r][place : place + total.numel()] for r in range(self.size)]
                combine_all(op, shares, total)

    def _arrive(self, mark: Signature | None, deadline: float) -> None:
        """Arrive in the first round of a call, with its mark, or in a later round, without."""
        if mark is None:
            self._board.barrier(deadline)
        else:
            self.first(mark, deadline)

    def piece(self, element_size: int) -> int:
        """Return the number of elements per rank that fit together into a stage."""
        return max(1, self.stage_bytes // self.size // element_size)


def root_of(call: CollectiveCall) -> int:
    """Return the root of a call that has one."""
    assert call.root is not None
    return call.root
