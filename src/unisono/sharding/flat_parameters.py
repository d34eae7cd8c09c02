"""Parameters of one dtype in one flat tensor, of which each rank keeps a part."""

from __future__ import annotations

from contextlib import suppress

import torch

from unisono.communicator import Communicator
from unisono.core.types import Work
from unisono.errors import CommError
from unisono.sharding.flat_gradient import FlatGradient
from unisono.sharding.freed import free, refill
from unisono.sharding.layout import FlatLayout
from unisono.utils.bucket_plan import Named

__all__ = ["FlatParameters"]


class FlatParameters:
    """Parameters that are gathered by one message, and whose gradients are reduced by another.

    The parameters are views of a flat tensor, whose storage is empty unless it is gathered. Its elements are in
    contiguous order, whatever the strides of the parameters were.

    Args:
        named: The parameters, with their names: of one dtype, device and `requires_grad`.
        comm: The ranks that share them.
        padding: Number of elements after the last parameter.
        param_dtype: Dtype of the gathered parameters; theirs if None.
        reduce_dtype: Dtype in which gradients are averaged; that of the gathered parameters if None.

    Attributes:
        names, parameters: As passed.
        layout: Places of the parameters in the flat tensor.
        slices: Those on this rank.
        part: This rank's elements, in the parameters' first dtype.
        gradient: Gradient of `part`; None for frozen parameters.
        gathered: Whether the parameters can be used.
    """

    def __init__(
        self,
        named: Named,
        comm: Communicator,
        padding: int,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named if isinstance(p, torch.nn.Parameter)]
        numels = [p.numel() for p in self.parameters]
        self.layout = FlatLayout([*numels, padding], comm.size)
        self.slices = [s for s in self.layout.slices(comm.rank) if s.index < len(named)]
        self.gathered = False
        self._comm = comm
        self._work: Work | None = None
        self._classes = [type(p) for p in self.parameters]
        self._strides = [torch.empty_like(p, device="meta").stride() for p in self.parameters]
        unused = self.parameters[0].new_zeros(self.layout.total - sum(numels))
        flat = torch.cat([*(p.detach().reshape(-1) for p in self.parameters), unused])
        self.part = flat[comm.rank * self.layout.part :][: self.layout.part].clone()
        self._whole = flat if param_dtype is None else flat.to(param_dtype)
        self.gradient: FlatGradient | None = None
        if self.parameters[0].requires_grad:
            self.gradient = FlatGradient(self.layout, comm, self.part.dtype, reduce_dtype or self._whole.dtype)
        for name, parameter in named:
            parameter.__dict__["_sharded_name"] = name
        self.show(self._whole)
        self.free()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' places in a tensor of the layout, in their shapes."""
        places = zip(self.layout.offsets, self.parameters, strict=False)
        return [flat[start : start + p.numel()].view(p.shape) for start, p in places]

    def show(self, flat: torch.Tensor | None = None) -> None:
        """Let the parameters be views of another flat tensor; by default of the one that is gathered and freed."""
        flat = self._whole if flat is None else flat
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, view in zip(self.parameters, self.views(flat), strict=True):
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
            self._work = self._comm.all_gather_single(self._whole, part, async_op=True)
        else:
            self._comm.all_gather_single(self._whole, part)
            self._show_filled()

    def finish_gather(self) -> None:
        """Wait until the parameters can be used."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
            self._show_filled()

    def _show_filled(self) -> None:
        self.gathered = True
        refill(self.parameters, self._classes)

    def free(self) -> None:
        """Release the memory of the parameters."""
        if self._work is not None:
            work, self._work = self._work, None
            with suppress(CommError):
                work.wait()
        self.gathered = False
        free(self.parameters)
        self._whole.untyped_storage().resize_(0)

    def gather_part(self) -> torch.Tensor:
        """Return all elements in the dtype of `part`, in a tensor of their own. Collective."""
        flat = self.part.new_empty(self.layout.total)
        self._comm.all_gather_single(flat, self.part)
        return flat

    def restore(self) -> None:
        """Let the parameters be plain again, with their first strides. Collective."""
        flat = self.gather_part()
        self._show_filled()
        for parameter, view, strides in zip(self.parameters, self.views(flat), self._strides, strict=True):
            parameter.data = view.new_empty_strided(view.shape, strides).copy_(view)
            del parameter.__dict__["_sharded_name"]
