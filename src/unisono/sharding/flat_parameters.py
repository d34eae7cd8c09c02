"""Parameters of one dtype in one flat tensor, of which each rank keeps a part."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from unisono.core.types import Work
from unisono.errors import CommError
from unisono.sharding.comms import ShardComms
from unisono.sharding.flat_gradient import FlatGradient
from unisono.sharding.freed import free, refill
from unisono.sharding.shard_optimizer import Piece
from unisono.utils.bucket_plan import Named
from unisono.utils.layout import FlatLayout, Slice

__all__ = ["FlatParameters"]


class FlatParameters:
    """Parameters that are gathered by one message, and whose gradients are reduced by another.

    The parameters are views of a flat tensor, whose storage is empty unless it is gathered. Its elements are in
    contiguous order, whatever the strides of the parameters were.

    Args:
        named: The parameters, with their names: of one dtype, device and `requires_grad`.
        comms: The ranks that share them.
        padding: Number of elements after the last parameter.
        param_dtype: Dtype of the gathered parameters; theirs if None.
        reduce_dtype: Dtype in which gradients are averaged; that of the gathered parameters if None.

    Attributes:
        names, parameters: As passed.
        layout: Places of the parameters in the flat tensor.
        part: This rank's elements, in the parameters' first dtype.
        pieces: This rank's slice of each parameter, in the memory of `part`; may be empty.
        gradient: Gradient that backward passes fill; None for frozen parameters.
        gathered: Whether the parameters can be used.
    """

    def __init__(
        self,
        named: Named,
        comms: ShardComms,
        padding: int,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named if isinstance(p, nn.Parameter)]
        self.gathered = False
        self._comms = comms
        self._work: Work | None = None
        # What autograd has saved of the parameters is valid at this version. While they are freed, theirs is higher.
        self._version = 0
        self._classes = [type(p) for p in self.parameters]
        self._strides = [torch.empty_like(p, device="meta").stride() for p in self.parameters]
        first = self.parameters[0]
        self._part_dtype = first.dtype
        self._dtype = param_dtype if param_dtype is not None and first.is_floating_point() else first.dtype
        self.pieces = [
            Piece(name, p.shape, 0, nn.Parameter(p.new_empty(0), requires_grad=p.requires_grad)) for name, p in named
        ]
        self._cut(padding)
        for piece, p in zip(self.pieces, self.parameters, strict=True):
            piece.tensor.detach().copy_(piece.cut(p.detach()))
        self.gradient: FlatGradient | None = None
        if first.requires_grad:
            self.gradient = FlatGradient(self.layout, comms, reduce_dtype or self._dtype)
        for name, parameter in named:
            parameter.__dict__["_sharded_name"] = name
        self._make_whole()

    def _cut(self, padding: int) -> None:
        """Make the part of this rank, and let the pieces be slices of it, with undefined elements."""
        self.layout = FlatLayout([*(p.numel() for p in self.parameters), padding], self._comms.size)
        self.part = torch.zeros(self.layout.part, dtype=self._part_dtype, device=self.parameters[0].device)
        places = {place.index: place for place in self.layout.slices(self._comms.rank)}
        for index, piece in enumerate(self.pieces):
            place = places.get(index, Slice(index, 0, 0, 0))
            piece.move(place.start, self.part[place.offset : place.offset + place.numel])

    def _make_whole(self) -> None:
        """Let the parameters be views of a flat tensor, and free it."""
        self._whole = torch.empty(self.layout.total, dtype=self._dtype, device=self.part.device)
        # Torch makes no views of a freed tensor.
        self._places = self._views(self._whole)
        self._point_to(self._places)
        self.changed()
        self.gathered = True
        self.free()

    def recut(self, padding: int) -> None:
        """Be of the ranks that the communicator now has. Gradients are dropped, and elements are undefined."""
        self.free()
        self._cut(padding)
        if self.part.is_floating_point():
            self.part.fill_(torch.nan)
        if self.gradient is not None:
            self.gradient.move_to(self.layout)
        self.changed()
        refill(self.parameters, self._classes, self._version)
        self._make_whole()

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' places in a flat tensor, in their shapes."""
        places = zip(self.layout.offsets, self.parameters, strict=False)
        return [flat[start : start + p.numel()].view(p.shape) for start, p in places]

    def _point_to(self, views: list[torch.Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    # -- the whole ------------------------------------------------------------------------------
    def start_gather(self, *, async_op: bool) -> None:
        """Begin to fill the parameters, unless they are filled. Collective."""
        if self.gathered or self._work is not None:
            return
        storage = self._whole.untyped_storage()
        storage.resize_(self._whole.nbytes)
        part = self.part.to(self._whole.dtype)
        if async_op:
            self._work = self._comms.data.all_gather_single(self._whole, part, async_op=True)
        else:
            self._comms.data.all_gather_single(self._whole, part)
            self._show_filled()

    def finish_gather(self) -> None:
        """Wait until the parameters can be used."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
            self._show_filled()

    def _show_filled(self) -> None:
        self.gathered = True
        refill(self.parameters, self._classes, self._version)

    def free(self) -> None:
        """Release the memory of the parameters."""
        if self._work is not None:
            work, self._work = self._work, None
            with suppress(CommError):
                work.wait()
        if self.gathered:
            self.gathered = False
            free(self.parameters, self._version + 1)
        self._whole.untyped_storage().resize_(0)

    def changed(self) -> None:
        """Let autograd refuse what it has saved of the parameters, because the elements are others."""
        self._version = 1 + max(parameter._version for parameter in self.parameters)

    def written(self) -> str | None:
        """Return the name of a gathered parameter that was changed in place."""
        pairs = zip(self.names, self.parameters, strict=True) if self.gathered else ()
        return next((name for name, parameter in pairs if parameter._version != self._version), None)

    def is_seen_by(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the parameters' memory."""
        if tensor.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        return bool(tensor.untyped_storage()._cdata == self._whole.untyped_storage()._cdata)

    # -- outside of training --------------------------------------------------------------------
    def show_whole(self) -> torch.Tensor:
        """Let the parameters be views of a new tensor with all elements, and return that. Collective."""
        flat = self.part.new_empty(self.layout.total)
        self._comms.data.all_gather_single(flat, self.part)
        self.changed()
        self._show_filled()
        self._point_to(self._views(flat))
        return flat

    def hide_whole(self, flat: torch.Tensor, *, writeback: bool) -> None:
        """Undo `show_whole`. With `writeback`, keep this rank's part of what the tensor holds now."""
        if writeback:
            self.part.copy_(flat[self._comms.rank * self.layout.part :][: self.layout.part])
        self._point_to(self._places)
        self.changed()
        self.free()

    def restore(self) -> None:
        """Let the parameters be plain again, with their first strides. Collective."""
        self.show_whole()
        for parameter, strides in zip(self.parameters, self._strides, strict=True):
            parameter.data = parameter.new_empty_strided(parameter.shape, strides).copy_(parameter.data)
            del parameter.__dict__["_sharded_name"]

    # -- gradients ------------------------------------------------------------------------------
    def take(self, index: int) -> None:
        """Move a parameter's p.grad into `gradient`."""
        parameter = self.parameters[index]
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        assert self.gradient is not None
        if grad.layout != torch.strided:
            raise RuntimeError(f"{self.names[index]!r} has a sparse gradient, which has no parts. Use sparse=False")
        with torch.no_grad():
            self.gradient.take(index, grad)

    def forget(self, index: int) -> None:
        """Drop a parameter's gradient that is not reduced."""
        if self.gradient is not None:
            self.gradient.taken.discard(index)
