"""Whole parameters in one flat tensor, of which each rank updates a part and receives the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.core.tensor_shard import TensorShard
from unisono.core.types import Work
from unisono.sharding.comms import ShardComms
from unisono.sharding.flat_gradient import FlatGradient
from unisono.sharding.shard_optimizer import Piece
from unisono.utils.bucket_plan import Named
from unisono.utils.layout import FlatLayout, Slice

__all__ = ["ParameterBucket"]


class ParameterBucket:
    """Parameters of one dtype and device that are updated and gathered together.

    The parameters become views of one flat tensor, in contiguous order.

    Args:
        indices: Numbers of the parameters.
        named: The parameters, with their names.
        comms: The ranks that share them. Rank 0's values are broadcast.
        master_dtype: Dtype in which this rank updates its part, instead of the parameters' own.

    Attributes:
        indices: As passed.
        parameters: The parameters.
        pieces: This rank's slice of each.
        gradient: Gradients that are sharded as they arrive.
    """

    def __init__(
        self, indices: Sequence[int], named: Named, comms: ShardComms, master_dtype: torch.dtype | None
    ) -> None:
        self.indices, self.parameters, self._comms = indices, [p for _, p in named], comms
        raised = master_dtype is not None and self.parameters[0].is_floating_point()
        self._dtype = master_dtype if raised else self.parameters[0].dtype
        self.pieces = [
            Piece(
                name, p.shape, 0, torch.nn.Parameter(p.new_empty(0, dtype=self._dtype), requires_grad=p.requires_grad)
            )
            for name, p in named
        ]
        self._cut()
        comms.steps.broadcast(self._flat, 0)
        self._master.copy_(self._part)
        self.gradient = FlatGradient(self._layout, comms, self._flat.dtype)

    def _cut(self) -> None:
        """Let the parameters be views of a flat tensor, and the pieces slices of this rank's part."""
        self._layout = layout = FlatLayout([p.numel() for p in self.parameters], self._comms.size)
        self._flat = self.parameters[0].new_zeros(layout.total)
        self._views = [
            self._flat[start : start + p.numel()].view(p.shape)
            for start, p in zip(layout.offsets, self.parameters, strict=True)
        ]
        for view, parameter in zip(self._views, self.parameters, strict=True):
            view.copy_(parameter)
            parameter.data = view
        self._part = self._flat[self._comms.rank * layout.part :][: layout.part]
        self._master = self._part.to(self._dtype)
        self._slices = {place.index: place for place in layout.slices(self._comms.rank)}
        for slot, piece in enumerate(self.pieces):
            place = self._place(slot)
            piece.move(place.start, self._master[place.offset : place.offset + place.numel])

    def _place(self, slot: int) -> Slice:
        return self._slices.get(slot, Slice(slot, 0, 0, 0))

    @torch.no_grad()
    def recut(self) -> None:
        """Be of the ranks that the communicator now has. Gradients are dropped."""
        self._cut()
        self.gradient.move_to(self._layout)

    def shard(self, slot: int) -> TensorShard:
        """Return this rank's elements of a parameter, in the memory of the parameter."""
        place, piece = self._place(slot), self.pieces[slot]
        return TensorShard(self._part[place.offset : place.offset + place.numel], piece.start, piece.shape)

    @property
    def has_master(self) -> bool:
        """Return whether this rank updates a copy of its part in another dtype."""
        return self._master.dtype != self._part.dtype

    def check(self) -> None:
        """`RuntimeError` if a parameter is no longer in the flat tensor."""
        for view, parameter, piece in zip(self._views, self.parameters, self.pieces, strict=True):
            if parameter.data_ptr() != view.data_ptr() or parameter.dtype != view.dtype:
                raise RuntimeError(
                    f"{piece.name!r} was given other memory, dtype or device after its optimizer was created. Change "
                    "the model first, then create the ShardedOptimizer"
                )

    def check_frozen(self) -> None:
        """`RuntimeError` if a parameter is no longer frozen."""
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{piece.name!r} was frozen when its optimizer was created, so its gradient is not averaged. Call "
                    "remove() on the optimizer, and create a new one"
                )

    def cut_gradients(self) -> None:
        """Give each piece its elements of p.grad. `ValueError` for a sparse gradient."""
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            grad = parameter.grad
            if grad is not None and grad.layout != torch.strided:
                raise ValueError(f"the gradient of {piece.name!r} is sparse, which cannot be sharded")
            piece.tensor.grad = None if grad is None else piece.cut(grad.detach()).to(piece.tensor.dtype)

    def follow_parameters(self) -> None:
        """Take over the elements of this rank's part that were written since the last step, as by a checkpoint."""
        if self.has_master:
            same = self._master.to(self._part.dtype) == self._part
            self._master.copy_(torch.where(same, self._master, self._part.to(self._master.dtype)))

    def start_gather(self) -> Work:
        """Begin to send this rank's updated part to all others, and to receive theirs. Collective."""
        if self.has_master:
            self._part.copy_(self._master)
        return self._comms.steps.all_gather_single(self._flat, self._part, async_op=True)
