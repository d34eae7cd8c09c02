"""Parameters of one dtype in a flat tensor that is partitioned among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.core.staging import ACCELERATORS
from unisono.core.tensor_shard import TensorShard
from unisono.core.tensors import HALVES, divide, is_transformed
from unisono.core.types import Work
from unisono.errors import CommError
from unisono.sharding.comms import ShardComms
from unisono.utils.flatten import FlatLayout, ParameterSlice
from unisono.utils.parameters import Named

__all__ = [
    "FlatGradient",
    "FlatParameters",
    "FreedParameter",
    "OneStream",
    "ParameterBucket",
    "ParameterPiece",
    "ShardedGradient",
]


@dataclass(slots=True)
class ParameterPiece:
    """Slice of one parameter that this rank updates. Each rank has a possibly empty piece of each parameter.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the whole parameter.
        start: Index of the first element in the flattened parameter.
        tensor: 1-d parameter that the optimizer updates; its `.grad` is set before the step.
        replica: Index of this rank among the ranks that have the same slice.
    """

    name: str
    shape: torch.Size
    start: int
    tensor: nn.Parameter
    replica: int = 0

    @property
    def stop(self) -> int:
        """Index in the flattened parameter after this piece's last element."""
        return self.start + len(self.tensor)

    def move(self, start: int, elements: torch.Tensor) -> None:
        """Change to a different slice, after the number of ranks has changed. The tensor remains the same object.

        Args:
            start: Index of the slice's first element in the flattened parameter.
            elements: Memory for the slice.
        """
        self.start = start
        self.tensor.grad = None
        self.tensor.data = elements

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this piece's elements from a tensor with the parameter's shape; a view if its strides allow."""
        return whole.reshape(-1)[self.start : self.stop]

    def wrap(self, elements: torch.Tensor) -> TensorShard:
        """Return elements of this piece as a `TensorShard` for a checkpoint."""
        return TensorShard(elements, self.start, self.shape, self.replica)


def _make_pieces(named: Named, dtype: torch.dtype) -> list[ParameterPiece]:
    """Return an empty piece for each parameter."""
    return [
        ParameterPiece(name, p.shape, 0, nn.Parameter(p.new_empty(0, dtype=dtype), requires_grad=p.requires_grad))
        for name, p in named
    ]


def _move_pieces(pieces: Sequence[ParameterPiece], layout: FlatLayout, comms: ShardComms, part: torch.Tensor) -> None:
    """Point the pieces at slices of this rank's part."""
    # A parameter outside this rank's part gets an empty piece, so that on every rank, piece n corresponds to parameter
    # n of the unsharded optimizer.
    slices = {place.index: place for place in layout.slices(comms.rank)}
    for index, piece in enumerate(pieces):
        place = slices.get(index, ParameterSlice(index, 0, 0, 0))
        piece.move(place.start, part[place.offset : place.offset + place.numel])
        piece.replica = comms.replica


class FlatParameters:
    """Parameters that are gathered in one message, and whose gradients are reduced in one message.

    The parameters are views of a flat tensor, whose storage is empty while they are not gathered. Each parameter's
    elements are in contiguous order, regardless of its original strides.

    Args:
        named: The parameters, with their names; all have the same dtype, device and `requires_grad`.
        comms: Communicators of the ranks that share the parameters.
        padding: Number of padding elements after the last parameter.
        param_dtype: Dtype of the gathered parameters; their original dtype if None.
        reduce_dtype: Dtype in which gradients are averaged; the dtype of the gathered parameters if None.

    Attributes:
        parameters: The parameters.
        layout: Positions of the parameters in the flat tensor.
        part: This rank's elements, in the parameters' original dtype.
        pieces: This rank's slice of each parameter, in the memory of `part`; may be empty.
        frozen: Whether the parameters were frozen when the model was sharded.
        gradient: Gradients of the parameters from backward passes. Nothing is ever added for frozen parameters.
        gathered: Whether the parameters are gathered and can be used.
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
        self.parameters: list[nn.Parameter] = [p for _, p in named if isinstance(p, nn.Parameter)]
        self.gathered: bool = False
        self._comms = comms
        self._work: Work | None = None
        # Version counter of gathered parameters. Freed parameters have a higher version, so that autograd rejects them:
        # it compares a tensor's version with the version at which it saved the tensor.
        self._version = 0
        self._classes = [type(p) for p in self.parameters]
        # The strides of `empty_like` have no gaps, so `restore` gives dense memory even to a parameter that was a slice
        # of a larger tensor.
        self._strides = [torch.empty_like(p, device="meta").stride() for p in self.parameters]
        first = self.parameters[0]
        self._dtype = param_dtype if param_dtype is not None and first.is_floating_point() else first.dtype
        self.pieces: list[ParameterPiece] = _make_pieces(named, first.dtype)
        self._cut(padding)
        # Copy the elements before `_make_whole`, which replaces the parameters' own memory.
        for piece, p in zip(self.pieces, self.parameters, strict=True):
            piece.tensor.detach().copy_(piece.cut(p.detach()))
        self.frozen: bool = not first.requires_grad
        self.gradient: FlatGradient = FlatGradient(self.layout, comms, reduce_dtype or self._dtype, self.part.device)
        for name, parameter in named:
            # The code that refuses the use of a freed parameter gets only the tensor, so store the parameter's name in
            # the tensor.
            parameter.__dict__["_sharded_name"] = name
        self._make_whole()

    def _cut(self, padding: int) -> None:
        """Allocate this rank's part, with undefined elements, and point the pieces at slices of it."""
        self.layout: FlatLayout = FlatLayout([*(p.numel() for p in self.parameters), padding], self._comms.size)
        # The padding belongs to no piece, but each gather sends it, so it must be initialized.
        self.part: torch.Tensor = self.pieces[0].tensor.new_zeros(self.layout.part)
        _move_pieces(self.pieces, self.layout, self._comms, self.part)

    def _make_whole(self) -> None:
        """Make the parameters views of a flat tensor, and free that tensor."""
        self._whole = torch.empty(self.layout.total, dtype=self._dtype, device=self.part.device)
        # Create the views before freeing the tensor, because torch refuses to create views of a freed tensor.
        self._places = self.layout.views(self._whole, self.parameters)
        self._point_to(self._places)
        # Change the version before `free` uses it, because autograd must reject references to the parameters' earlier
        # memory. Set `gathered`, because `free` would otherwise not mark the parameters as freed.
        self.changed()
        self.gathered = True
        self.free()

    def recut(self, padding: int) -> None:
        """Re-partition for the current communicator. Gradients are dropped, and elements are undefined."""
        self.free()
        self._cut(padding)
        # Until a state is loaded, a loss must be NaN, not the plausible loss of a model whose parameters are zero.
        if self.part.is_floating_point():
            self.part.fill_(torch.nan)
        self.gradient.move_to(self.layout)
        self.changed()
        # Freed parameters would refuse the assignment of `.data` in `_make_whole`, so mark them as gathered.
        self._show(gathered=True)
        self._make_whole()

    def _point_to(self, views: list[torch.Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    # -- the whole ------------------------------------------------------------------------------
    def start_gather(self, *, async_op: bool) -> None:
        """Start gathering the parameters, unless they are already gathered. Collective."""
        if self.gathered or self._work is not None:
            return
        # Resize the storage instead of allocating a new one, because the parameters, and the tensors that autograd has
        # saved, are views of it.
        self._whole.untyped_storage().resize_(self._whole.nbytes)
        part = self.part.to(self._whole.dtype)
        self._work = self._comms.run(self._comms.live.shard.all_gather_single, self._whole, part, async_op=async_op)
        # Until a gather in the background has ended, any use of the parameters must still raise an error.
        if not async_op:
            self._show(gathered=True)

    def finish_gather(self) -> None:
        """Wait until the parameters are usable."""
        if self._work is not None:
            work = self._work
            self._work = None
            self._comms.run(work.wait)
            self._show(gathered=True)

    def _show(self, *, gathered: bool) -> None:
        """If `gathered`, make the parameters and autograd's saved references usable; otherwise, make any use raise."""
        self.gathered = gathered
        classes: Iterable[type] = self._classes if gathered else repeat(FreedParameter)
        # Change each parameter's class instead of replacing the object, to which modules, hooks and the user's code
        # refer.
        for parameter, cls in zip(self.parameters, classes, strict=False):
            parameter.__class__ = cls
        # Autograd does not check the class of its saved tensors, but checks their version. If freed parameters had the
        # version of gathered ones, a backward pass that had bypassed the hooks would read freed memory and crash the
        # process.
        version = self._version if gathered else self._version + 1
        torch._C._autograd._unsafe_set_version_counter(tuple(self.parameters), (version,) * len(self.parameters))

    def free(self) -> None:
        """Release the memory of the parameters."""
        if self._work is not None:
            work = self._work
            self._work = None
            # Wait for the gather, because it writes to the parameters' memory until it ends. If the gather fails, its
            # error is not lost: the next call on the communicator raises it.
            with suppress(CommError):
                work.wait()
        if self.gathered:
            self._show(gathered=False)
        self._whole.untyped_storage().resize_(0)

    def changed(self) -> None:
        """Make autograd reject its saved references to the parameters, because their elements have changed."""
        # Choose a version above all counters, even those of freed parameters, because autograd has saved nothing at it.
        self._version = 1 + max([parameter._version for parameter in self.parameters])

    def written(self) -> str | None:
        """Return the name of a gathered parameter that was modified in place or got another `.data`; otherwise None."""
        # Skip freed parameters: their version counters differ from `_version` even without a write, because `_show` has
        # increased them.
        if self.gathered:
            for piece, parameter, place in zip(self.pieces, self.parameters, self._places, strict=True):
                if parameter._version != self._version:
                    return piece.name
                if parameter.data_ptr() != place.data_ptr():
                    # Point the parameters to `_places` again, where gathers write. Otherwise, all later steps would use
                    # the assigned values.
                    self._point_to(self._places)
                    return piece.name
        return None

    def is_seen_by(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the parameters' memory."""
        # Sparse tensors, and tensors wrapped by torch.func, have no storage to compare.
        if tensor.layout != torch.strided or is_transformed(tensor):
            return False
        return tensor.untyped_storage() is self._whole.untyped_storage()

    # -- outside training -----------------------------------------------------------------------
    def gather_whole(self) -> torch.Tensor:
        """Return a new tensor with all elements; the parameters remain as they are. Collective."""
        # Gather into a new tensor: `_whole` has the dtype used in training, which may be narrower than the parts'
        # dtype.
        flat = self.part.new_empty(self.layout.total)
        self._comms.run(self._comms.live.shard.all_gather_single, flat, self.part)
        return flat

    def show_whole(self, flat: torch.Tensor) -> None:
        """Make the parameters views of the tensor that `gather_whole` has returned."""
        # Change the version before `_show` assigns it to the parameters. Point the parameters to the new tensor after
        # `_show`, because freed parameters refuse the assignment of `.data`.
        self.changed()
        self._show(gathered=True)
        self._point_to(self.layout.views(flat, self.parameters))

    def unlike_whole(self) -> str | None:
        """Return the name of a parameter that got `.data` of another shape, dtype or device since `show_whole`."""
        for piece, parameter, place in zip(self.pieces, self.parameters, self._places, strict=True):
            if (parameter.shape, parameter.dtype, parameter.device) != (place.shape, self.part.dtype, place.device):
                return piece.name
        return None

    def assigned(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return a pair for each parameter that got another `.data`: its place in the tensor, and its copied values."""
        shown = zip(self.layout.views(flat, self._places), self.parameters, strict=True)
        return [
            (view, p.detach().clone())
            for view, p in shown
            if p.data_ptr() != view.data_ptr() or p.stride() != view.stride()
        ]

    def hide_whole(self, flat: torch.Tensor, *, writeback: bool) -> None:
        """Undo `show_whole`. With `writeback`, this rank's part gets the tensor's current values."""
        if writeback:
            self.part.copy_(self.layout.part_of(flat, self._comms.rank))
        # Point the parameters to `_places` again before `free`, because freed parameters refuse the assignment.
        self._point_to(self._places)
        self.changed()
        self.free()

    def restore(self, flat: torch.Tensor) -> None:
        """Make the parameters ordinary again, with their original strides and the values from `gather_whole`."""
        self.show_whole(flat)
        for parameter, strides in zip(self.parameters, self._strides, strict=True):
            parameter.data = parameter.new_empty_strided(parameter.shape, strides).copy_(parameter.data)
            del parameter.__dict__["_sharded_name"]


class OneStream:
    """Check that all work of a step is queued on a single stream of each device.

    Otherwise, the stream that allocated freed memory could reuse it while another stream is still using it.

    Args:
        devices: The devices.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if device.type in ACCELERATORS]
        self.begin()

    def begin(self) -> None:
        """Begin a step on this thread's current streams."""
        self._streams = list(map(torch.accelerator.current_stream, self._devices))

    def check(self) -> None:
        """Raise `RuntimeError` unless the current streams are the step's streams."""
        if list(map(torch.accelerator.current_stream, self._devices)) != self._streams:
            raise RuntimeError(
                "a sharded model or optimizer was used on several streams in one step. Run the whole forward on one "
                "stream, or average with GradientAverager, which follows all streams"
            )


class _Flight:
    """One reduction of a flat gradient, from its start until its result is added to the accumulated sum.

    On a mesh, gradients are summed in two stages (reduce_scatter in the shard group, all_reduce between replicas), and
    the sum is divided once. If the ranks of each shard group are consecutive, the two stages give the same sums as a
    balanced tree over all ranks.

    Args:
        comms: Communicators of the ranks whose gradients are averaged. Construction is collective.
        whole: This rank's gradients, which are overwritten.
        part: Number of elements of each rank's part.
    """

    def __init__(self, comms: ShardComms, whole: torch.Tensor, part: int) -> None:
        self._comms = comms
        # Whether the reduction between replicas has started.
        self._is_second = False
        # The reduction in flight, if any.
        self._work: Work | None = None
        live = comms.live
        if live.replicate is not None and whole.dtype in HALVES:
            # Divide before summing, because a half-precision sum could overflow.
            divide(whole, live.data.size)
        if comms.size == 1:
            # A single rank's part is the whole tensor, so the shard group has nothing to reduce or copy.
            self._new = whole
            return
        self._new = whole.new_empty(part)
        op = "sum" if live.replicate is not None else "avg"
        self._work = comms.run(live.shard.reduce_scatter_single, self._new, whole, op, async_op=live.data.overlaps)

    def advance(self) -> None:
        """Wait for the reduction in the shard group, and start the reduction between replicas."""
        if not self._is_second:
            self._wait()
            live = self._comms.live
            if live.replicate is not None:
                # Set the flag first, so that the reduction cannot be started a second time after an error.
                self._is_second = True
                self._work = self._comms.run(live.replicate.all_reduce, self._new, "sum", async_op=live.data.overlaps)

    def finish(self) -> torch.Tensor:
        """Wait for the average over all ranks, and return this rank's part of it."""
        self.advance()
        self._wait()
        live = self._comms.live
        if live.replicate is not None and self._new.dtype not in HALVES:
            divide(self._new, live.data.size)
        return self._new

    def abandon(self) -> None:
        """Wait until the reduction no longer writes to its memory; ignore its result and errors."""
        if self._work is not None:
            with suppress(CommError):
                self._work.wait()

    def _wait(self) -> None:
        work = self._work
        self._work = None
        if work is not None:
            self._comms.run(work.wait)


class FlatGradient:
    """Gradient of flat parameters.

    Gradients are collected one by one, reduced together, and committed once the backward pass has succeeded on all
    ranks.

    Args:
        layout: Positions of the parameters, and of the padding after them.
        comms: Communicators of the ranks that share the parameters.
        dtype: Dtype in which gradients are sent.
        device: Device of the parameters.

    Attributes:
        arrived: Indices of parameters whose gradient was passed to `take` in the current backward pass, and is not
            being reduced yet.
        taken: Indices of parameters with a gradient that is not yet reduced.
        reduced: Indices of parameters whose gradient is reduced or being reduced, and not yet committed.
    """

    def __init__(self, layout: FlatLayout, comms: ShardComms, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._comms = comms
        self._dtype = dtype
        self._stream = OneStream([device])
        self._flight: _Flight | None = None
        self.drop()

    def drop(self) -> None:
        """Drop all uncommitted gradients."""
        if self._flight is not None:
            self._flight.abandon()
        self._flight = None
        self._whole: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self.arrived: set[int] = set()
        self.taken: set[int] = set()
        self.reduced: set[int] = set()

    def move_to(self, layout: FlatLayout) -> None:
        """Drop all gradients, and re-partition for a different number of ranks."""
        self.drop()
        self._layout = layout

    def take(self, index: int, grad: torch.Tensor) -> None:
        """Add this rank's gradient of a parameter. Raises `RuntimeError` if gradients arrive on several streams."""
        if self._whole is None:
            self._stream.begin()
            # Don't initialize the memory, because `start_reduce` zeroes the places that no gradient has filled.
            self._whole = grad.new_empty(self._layout.total, dtype=self._dtype)
        self._stream.check()
        start = self._layout.offsets[index]
        place = self._whole[start : start + grad.numel()].view(grad.shape)
        self.arrived.add(index)
        if index in self.taken:
            place.add_(grad)
        else:
            place.copy_(grad)
            self.taken.add(index)

    def start_reduce(self) -> None:
        """Start averaging, over all ranks, the gradients passed to `take`. Collective."""
        # Finish the previous reduction first, so that results are added in the order of the passes, which is the same
        # on all ranks.
        self._finish_average()
        # Gradients that arrive from now on go to a new tensor, because the reduction overwrites this one.
        whole = self._whole
        self._whole = None
        assert whole is not None
        ends = [*self._layout.offsets[1:], self._layout.total]
        for index, (start, end) in enumerate(zip(self._layout.offsets, ends, strict=True)):
            if index not in self.taken:
                whole[start:end].zero_()
        # Zero the padding, because it is also sent: uninitialized memory there would change the digests of `un.record`.
        whole[self._layout.used :].zero_()
        self.reduced |= self.taken
        self.taken = set()
        self.arrived = set()
        self._flight = _Flight(self._comms, whole, self._layout.part)

    def finish_reduce(self) -> None:
        """Wait for the last reduction in the shard group, and start the reduction between replicas."""
        if self._flight is not None:
            self._flight.advance()

    def _finish_average(self) -> None:
        """Wait for the reduction in flight, if any, and add its result to the sum."""
        flight = self._flight
        if flight is not None:
            new = flight.finish()
            self._flight = None
            self._sum = new if self._sum is None else self._sum.add_(new)

    def commit(self, pieces: Sequence[ParameterPiece]) -> None:
        """Add the reduced gradients to `.grad` of this rank's pieces, after the pass has succeeded on all ranks.

        Args:
            pieces: This rank's slice of each parameter.
        """
        self._finish_average()
        begin = self._comms.rank * self._layout.part
        # Set `.grad` only for parameters in `reduced`: an optimizer with momentum or weight decay would change a
        # parameter even if its gradient were zero.
        for index in sorted(self.reduced):
            assert self._sum is not None
            tensor = pieces[index].tensor
            start = max(0, self._layout.offsets[index] + pieces[index].start - begin)
            grad = self._sum[start : start + len(tensor)].to(tensor.dtype)
            tensor.grad = grad if tensor.grad is None else tensor.grad.add_(grad)
        self._sum = None
        self.reduced = set()


class ParameterBucket:
    """Parameters of one dtype and device that are updated and gathered together.

    The parameters become views of one flat tensor, in contiguous order.

    Args:
        indices: Indices of the parameters among all parameters.
        named: The parameters, with their names.
        comms: Communicators of the ranks that share the parameters.
        master_dtype: Dtype in which this rank updates its part; the parameters' dtype if None.

    Attributes:
        indices: Indices of the parameters among all parameters.
        parameters: The parameters.
        pieces: This rank's slice of each parameter.
        gradient: Sharded gradients; unused if the optimizer does not shard gradients.
    """

    def __init__(
        self, indices: Sequence[int], named: Named, comms: ShardComms, master_dtype: torch.dtype | None
    ) -> None:
        self.indices = indices
        self.parameters: list[torch.Tensor] = [p for _, p in named]
        self._comms = comms
        raised = self.parameters[0].is_floating_point()
        self._dtype = master_dtype if master_dtype is not None and raised else self.parameters[0].dtype
        self.pieces: list[ParameterPiece] = _make_pieces(named, self._dtype)
        self._cut()
        self._master.copy_(self._part)
        self.gradient: FlatGradient = FlatGradient(self._layout, comms, self._flat.dtype, self._flat.device)

    def _cut(self) -> None:
        """Turn the parameters into views of a flat tensor, and point the pieces at slices of this rank's part."""
        self._layout = layout = FlatLayout([p.numel() for p in self.parameters], self._comms.size)
        self._flat = self.parameters[0].new_zeros(layout.total)
        self._views = layout.views(self._flat, self.parameters)
        for view, parameter in zip(self._views, self.parameters, strict=True):
            view.copy_(parameter)
            parameter.data = view
        self._part = layout.part_of(self._flat, self._comms.rank)
        # If the dtypes are equal, `to` returns the part itself, and the optimizer updates the flat tensor in place.
        self._master = self._part.to(self._dtype)
        _move_pieces(self.pieces, layout, self._comms, self._master)

    @torch.no_grad()
    def recut(self) -> None:
        """Re-partition for the current communicator. Gradients are dropped."""
        self._cut()
        self.gradient.move_to(self._layout)

    def shard(self, slot: int) -> TensorShard:
        """Return a view of this rank's elements of a parameter."""
        piece = self.pieces[slot]
        return piece.wrap(piece.cut(self._views[slot]))

    @property
    def has_master(self) -> bool:
        """Return whether this rank updates a copy of its part in another dtype."""
        return self._master.dtype != self._part.dtype

    def check(self) -> None:
        """Raise `RuntimeError` if a parameter is no longer a view of the flat tensor."""
        for view, parameter, piece in zip(self._views, self.parameters, self.pieces, strict=True):
            same = parameter.data_ptr() == view.data_ptr() and parameter.dtype == view.dtype
            if not same or parameter.shape != view.shape:
                raise RuntimeError(
                    f"{piece.name!r} was given other memory, shape, dtype or device after its optimizer was created. "
                    "Change the model first, then create the ShardedOptimizer"
                )

    def check_frozen(self) -> None:
        """Raise `RuntimeError` if a parameter is no longer frozen."""
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{piece.name!r} was frozen when its optimizer was created, so its gradient is not averaged. Call "
                    "remove() on the optimizer, and create a new one"
                )

    def cut_gradients(self) -> None:
        """Set each piece's gradient to its slice of p.grad; raise `ValueError` for a sparse gradient."""
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            grad = parameter.grad
            if grad is not None and grad.layout != torch.strided:
                raise ValueError(f"the gradient of {piece.name!r} is sparse, which cannot be sharded")
            piece.tensor.grad = None if grad is None else piece.cut(grad.detach()).to(piece.tensor.dtype)

    def follow_parameters(self) -> None:
        """Update the master copy where this rank's part changed outside `step()`, such as by loading a checkpoint."""
        if self.has_master:
            # Keep each element of the master copy that still rounds to the part's element: its low bits hold updates
            # that the parameters' dtype cannot represent.
            same = self._master.to(self._part.dtype) == self._part
            self._master.copy_(torch.where(same, self._master, self._part.to(self._master.dtype)))

    def start_gather(self) -> Work:
        """Start gathering the updated parts of all ranks in the shard group. Collective."""
        if self.has_master:
            self._part.copy_(self._master)
        # Don't use the communicators in `live`: a rank that fails in its next pass aborts them, while another rank may
        # still be waiting for parts of this step.
        return self._comms.shard_base.all_gather_single(self._flat, self._part, async_op=True)


_PROPERTIES = (
    "_backward_hooks _post_accumulate_grad_hooks _version device dtype grad_fn is_cpu is_cuda is_leaf is_meta "
    "is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu itemsize layout nbytes ndim output_nr "
    "requires_grad shape"
)
_METHODS = (
    "__hash__ __len__ dim element_size is_complex is_contiguous is_floating_point is_inference is_signed nelement "
    "ndimension numel register_hook register_post_accumulate_grad_hook requires_grad_ size storage_offset stride"
)
_METADATA: frozenset[Callable[..., Any]] = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        torch.is_complex,
        torch.is_floating_point,
        torch.is_inference,
        torch.numel,
    ]
)
_GRAD: Any = torch.Tensor.grad
_GRADIENT = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)
_DESCRIBED: frozenset[Callable[..., Any]] = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in ("_base", "grad", "is_mkldnn")),
        *(getattr(torch.Tensor, name) for name in ("_is_view", "is_conj", "is_neg", "untyped_storage")),
    ]
)
"""Attributes of p.grad that a compiler reads, even if the graph does not use p.grad."""


class _MetadataOnly(torch.Tensor):
    """Base class of tensors without elements, whose shape, dtype and other metadata can be read."""

    _metadata = _METADATA

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function that reads metadata; refuse any other function."""
        if func not in cls._metadata:
            cls._refuse(func, args, kwargs)
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def _refuse(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> NoReturn:
        raise NotImplementedError


class FreedParameter(_MetadataOnly, nn.Parameter):
    """Class of a sharded model's parameter while its elements are on other ranks.

    The parameter's shape, dtype and other metadata can be read; any other use raises `RuntimeError`.

    Raises:
        RuntimeError: Code used the parameter's elements or gradient; the error names the parameter.
    """

    @classmethod
    def _refuse(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> NoReturn:
        freed = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FreedParameter))
        name = freed.__dict__["_sharded_name"]
        if func in _GRADIENT:
            raise RuntimeError(
                f"{name!r} has no p.grad, because its model is sharded: each rank has the gradient of its part. "
                "Use optimizer.zero_grad() and sharded.clip_grad_norm_() of the ShardedModel"
            )
        raise RuntimeError(
            f"{name!r} was used while its elements are on other ranks: its model is sharded, and it is whole only "
            "while its own module runs. Use it inside `with sharded.full_parameters():`, or put the modules that use "
            "it into one unit (units=)"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Return text with the name and shape."""
        return f"FreedParameter({self.__dict__['_sharded_name']!r}, shape={list(self.shape)}, dtype={self.dtype})"


class ShardedGradient(_MetadataOnly):
    """Class of p.grad while each rank has a part of the gradient. Metadata can be read; any other use raises."""

    _metadata = _METADATA | _DESCRIBED

    @classmethod
    def _refuse(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} uses p.grad, which is sharded: each rank has a part of it. Use "
            "clip_grad_norm_() of the ShardedOptimizer, or create it with shard_gradients=False"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Return text with the shape."""
        return f"ShardedGradient(shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def of(cls, parameter: torch.Tensor) -> ShardedGradient:
        """Return a `ShardedGradient` for a parameter, without allocating memory for its elements."""
        # C++ code bypasses `__torch_function__`, and must read NaN, not a plausible gradient. Only one element is
        # allocated.
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        return nothing.expand(parameter.shape).as_subclass(cls)
