"""Whole parameters in one flat tensor, of which each rank updates a part and receives the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
        layout = FlatLayout([p.numel() for p in self.parameters], comms.size)
        self._flat = self.parameters[0].new_zeros(layout.total)
        self._views = [
            self._flat[start : start + p.numel()].view(p.shape)
            for start, p in zip(layout.offsets, self.parameters, strict=True)
        ]
        for view, parameter in zip(self._views, self.parameters, strict=True):
            view.copy_(parameter)
            parameter.data = view
        comms.data.broadcast(self._flat, 0)
        self._part = self._flat[comms.rank * layout.part :][: layout.part]
        raised = master_dtype is not None and self._flat.is_floating_point()
        self._master = self._part.to(master_dtype) if raised else self._part
        found = {place.index: place for place in layout.slices(comms.rank)}
        places = [found.get(slot, Slice(slot, 0, 0, 0)) for slot in range(len(named))]
        self.pieces = [
            Piece(name, p.shape, place.start, self._piece(place, p))
            for place, (name, p) in zip(places, named, strict=True)
        ]
        self.gradient = FlatGradient(layout, comms, self._flat.dtype)

    def _piece(self, place: Slice, parameter: torch.Tensor) -> torch.nn.Parameter:
        elements = self._master[place.offset : place.offset + place.numel]
        return torch.nn.Parameter(elements, requires_grad=parameter.requires_grad)

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

    def start_gather(self) -> list[Work]:
        """Begin to send this rank's updated part to all others, and to receive theirs. Collective.

        One broadcast from each rank: in place, where some backends copy all of an all_gather's output.
        """
        if self.has_master:
            self._part.copy_(self._master)
        data = self._comms.data
        parts = self._flat.view(data.size, len(self._part))
        return [data.broadcast(part, rank, async_op=True) for rank, part in enumerate(parts)]
