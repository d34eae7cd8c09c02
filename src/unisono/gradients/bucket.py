"""One message: several gradients in contiguous memory, and a header that shows which of them this rank has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from operator import attrgetter

import torch

from unisono.core.staging import current_streams, wait_for
from unisono.core.types import Work
from unisono.gradients.caller_gradients import SavedGradients
from unisono.host.native import native
from unisono.utils.flatten import dense_strides

__all__ = ["BucketContents", "GradientBucket"]

_dtype = attrgetter("dtype")

_REQUESTS = 3
"""Number of header elements for a rank's requests (late gradients, unfrozen parameters, used gradients)."""
_CHUNK_BYTES = 512 << 10
"""Chunks of this size are still in the cache when copied; copying each gradient separately would take longer."""


class GradientBucket:
    """Memory for the gradients sent in one message. After the reduction, each `p.grad` is a view of this memory.

    A bucket persists from step to step; its state in one step is a `BucketContents`.

    Args:
        indices: Indices of the bucket's parameters in the model. A parameter's position in this sequence is its slot.
        parameters: The parameters, which all have the same dtype and device.
        memory: One-dimensional tensor of `length(parameters)` elements, with the parameters' dtype and device.
        scale: Factor applied to each contribution when it is copied into the bucket.
        name: Names of the bucket's first and last parameter, for error messages.

    Attributes:
        memory: The whole message: the gradients, two header elements per gradient, and a few header elements for
            requests to all ranks.
        flat: The part of `memory` that contains the gradients.
        header: The part of `memory` that contains the header, sent separately if gradients are compressed.
        full_header: The header of a rank that has all gradients.
        views: For each gradient, a view of its part of the memory.
        chunks: Ranges of slots whose gradients are copied together. The last chunk contains all slots.
        complete: The result of `read_header` if every rank has all gradients.
        low, high: Address of the first gradient's first byte, and of the byte after the last gradient.
        addresses, lengths: For each gradient, the address and the number of bytes of its view.
        is_plain: Whether the views are contiguous memory that the native core can copy to.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[torch.Tensor],
        memory: torch.Tensor,
        scale: float = 1.0,
        name: str = "",
    ) -> None:
        self.name = name
        self.scale = scale
        self.indices: tuple[int, ...] = tuple(indices)
        self.parameters: list[torch.Tensor] = list(parameters)
        numels = [p.numel() for p in parameters]
        like = parameters[0]
        self.memory = memory
        self.flat: torch.Tensor = self.memory[: sum(numels)]
        self.header: torch.Tensor = self.memory[sum(numels) :]
        arrived = [scale] * len(numels) + [0] * (len(numels) + _REQUESTS)
        self.full_header: torch.Tensor = torch.tensor(arrived, dtype=like.dtype, device=like.device)
        self.views: list[torch.Tensor] = [
            _shaped(part, p) for part, p in zip(self.flat.split(numels), parameters, strict=True)
        ]
        self.complete: list[tuple[bool, bool]] = [(True, False)] * len(numels)
        self.shapes: list[torch.Size] = [p.shape for p in parameters]
        # On an accelerator, copy each gradient separately, on the stream that its hook runs on.
        self.chunks: list[Sequence[int]] = _chunks([p.nbytes for p in parameters], _CHUNK_BYTES if like.is_cpu else 0)
        self.low: int = self.flat.data_ptr()
        self.high: int = self.low + self.flat.nbytes
        self.addresses: list[int] = [view.data_ptr() for view in self.views]
        self.lengths: list[int] = [view.nbytes for view in self.views]
        contiguous = all(map(torch.Tensor.is_contiguous, self.views))
        self.is_plain: bool = contiguous and like.is_cpu and not like.is_complex()

    @staticmethod
    def length(parameters: Sequence[torch.Tensor]) -> int:
        """Return the number of elements of a bucket for these parameters."""
        return sum(p.numel() for p in parameters) + 2 * len(parameters) + _REQUESTS

    def holds(self, grad: torch.Tensor) -> bool:
        """Return whether a gradient is stored in this bucket's memory."""
        return grad.layout == torch.strided and grad.numel() > 0 and self.low <= grad.data_ptr() < self.high

    def is_place(self, slot: int, grad: torch.Tensor) -> bool:
        """Return whether a gradient is stored in the place where its mean will be."""
        return self.holds(grad) and _same(grad, self.views[slot])


class BucketContents:
    """State of a bucket in one step, dropped at the end of the step.

    `take` copies gradients into the bucket, and `finalize` completes it for the reduction. After the reduction and
    `read_header`, the bucket contains the means. `rewind` undoes an aborted reduction if a copy was kept.

    Args:
        bucket: The bucket.

    Attributes:
        bucket: The bucket.
        inside: For each slot, a byte that is 1 once its gradient is in the bucket.
        arrived: For each slot, whether this rank has its gradient; valid once the bucket is full.
        started: Whether the bucket is being reduced, or has been.
        work: The reduction, while it is in flight.
        found: The result of `read_header`; empty before it is called.
        asked: For each kind of request, whether any rank made such a request; set by `read_header`.
        observed_s: Start time of a traced reduction, from `time.perf_counter`.
    """

    def __init__(self, bucket: GradientBucket) -> None:
        self.bucket = bucket
        self.inside: bytearray = bytearray(len(bucket.parameters))
        self.arrived: list[bool] = []
        self.started: bool = False
        self.work: Work | None = None
        self.found: list[tuple[bool, bool]] = []
        self.asked: list[bool] = [False] * _REQUESTS
        self.observed_s: float | None = None
        self._factor = 1.0
        self._graphs: dict[int, torch.Tensor] = {}
        self._backup: torch.Tensor | None = None
        self._streams: set[torch.Stream] = set()

    # -- before the reduction -------------------------------------------------------------------
    def take(self, slots: Iterable[int]) -> None:
        """Move gradients from p.grad into the bucket, where they are added to gradients copied earlier."""
        bucket = self.bucket
        new: list[int] = []
        grads: list[torch.Tensor] = []
        sources: list[int] = []
        for slot in slots:
            parameter = bucket.parameters[slot]
            grad = parameter.grad
            # Skip the slot: the gradient has not arrived, or a hook has removed it.
            if grad is None:
                continue
            if grad.requires_grad or grad.layout != torch.strided:
                grad = self._plain(slot, grad)
            source = grad.data_ptr()
            # This gradient is in the memory of another one: copying it within the bucket would silently mix the two.
            if bucket.low <= source < bucket.high and not _same(grad, bucket.views[slot]):
                raise RuntimeError(
                    f"the gradient of parameter number {bucket.indices[slot]} is memory of the averager for other "
                    "gradients: it was taken from another parameter, or is a transpose. Assign a clone() instead"
                )
            if self.inside[slot]:
                bucket.views[slot].add_(grad, alpha=bucket.scale)
            else:
                self.inside[slot] = True
                new.append(slot)
                grads.append(grad)
                sources.append(source)
            # Clear p.grad, so that a later gradient of this parameter arrives separately and can be added.
            parameter.grad = None
        if not bucket.memory.is_cpu:
            self._streams.update(current_streams([bucket.memory.device]))
        if grads:
            self._copy(new, grads, sources)

    def _copy(self, slots: list[int], grads: list[torch.Tensor], sources: list[int]) -> None:
        """Copy the gradients at the addresses `sources` to their slots, in the native core if possible."""
        bucket = self.bucket
        # The native core copies bytes, so it can't copy a subclass (its elements may be elsewhere), a gradient of
        # another dtype (`grad_dtype`) or a negated view (its memory has the opposite signs).
        core = native() if bucket.is_plain and bucket.scale == 1.0 else None
        if (
            core is not None
            and set(map(type, grads)) == {torch.Tensor}
            and set(map(_dtype, grads)) == {bucket.memory.dtype}
            and all(map(torch.Tensor.is_contiguous, grads))
            and not any(map(torch.Tensor.is_neg, grads))
        ):
            addresses = list(map(bucket.addresses.__getitem__, slots))
            core.copy_gradients(addresses, sources, list(map(bucket.lengths.__getitem__, slots)))
            return
        views = list(map(bucket.views.__getitem__, slots))
        if bucket.scale == 1.0:
            torch._foreach_copy_(views, grads)
            return
        for view, grad in zip(views, grads, strict=True):
            torch.mul(grad, bucket.scale, out=view)

    def follow_streams(self) -> None:
        """Make later work on this stream wait for the copies that hooks made on other streams."""
        wait_for(self._streams)
        self._streams.clear()

    def finalize(
        self,
        arrived: Set[int],
        earlier: dict[int, torch.Tensor],
        factor: float = 1.0,
        here: bool = True,
        flags: Sequence[bool] = (),
        backup: bool = False,
    ) -> None:
        """Copy the remaining gradients, or zeros if missing; multiply by this rank's weight; write the header.

        Args:
            arrived: Indices of the parameters that received a gradient, whether or not it is in the bucket yet.
            earlier: Gradients from before the pass, by parameter index, to be added to the new gradients.
            factor: This rank's weight.
            here: Whether this rank has data. A rank without data reports its gradients neither as present nor as
                missing.
            flags: For each kind of request, whether this rank makes such a request.
            backup: Whether to keep a copy, for `rewind`.
        """
        bucket = self.bucket
        # After a rewind, the restored copy already includes the gradients in `earlier`, and p.grad is None.
        first = not self.arrived
        more = []
        for slot, (index, parameter, inside) in enumerate(
            zip(bucket.indices, bucket.parameters, self.inside, strict=True)
        ):
            held = earlier.get(index) if earlier else None
            has = parameter.grad is not None
            if first:
                self.arrived.append(bool(inside) or (index in arrived and (has or held is not None)))
                if held is not None:
                    more.append((slot, held))
            if not (inside or has):
                bucket.views[slot].zero_()
        self.take(range(len(bucket.parameters)))
        # Add earlier gradients after `take`, which overwrites slots that had no gradient yet.
        for slot, held in more:
            bucket.views[slot].add_(held, alpha=bucket.scale)
            self.inside[slot] = True
        # Make the copy before applying the factor, because a retry may use a different weight.
        self._backup = bucket.memory.clone() if backup else None
        self.started = True
        self._factor = factor
        if not factor:
            # Don't multiply by 0: a gradient with weight 0 may be NaN, for example the mean over no samples.
            bucket.flat.zero_()
        elif factor != 1.0:
            bucket.flat.mul_(factor)
        bucket.header.copy_(bucket.full_header if all(self.arrived) else self._partial_header(here))
        for index, ask in enumerate(flags):
            if ask:
                bucket.header[index - _REQUESTS] = bucket.scale

    def _partial_header(self, here: bool) -> torch.Tensor:
        """Return the header of a rank that lacks some gradients."""
        lacks = [here and not arrived for arrived in self.arrived]
        header = [*self.arrived, *lacks, *[False] * _REQUESTS]
        return torch.tensor(header, dtype=self.bucket.header.dtype).mul_(self.bucket.scale)

    def _plain(self, slot: int, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient as a dense tensor without an autograd graph."""
        if grad.requires_grad:
            self._graphs[slot] = grad
            grad = grad.detach()
        return grad if grad.layout == torch.strided else grad.to_dense()

    def is_late(self) -> bool:
        """Return whether a gradient arrived during the reduction.

        A late gradient arrives after `take` has cleared `p.grad` and before `read_header` fills `found`. With
        synchronous reductions, no gradient is late, because nothing is sent before the pass ends.
        """
        return not self.found and any(p.grad is not None for p in self.bucket.parameters)

    def can_rewind(self) -> bool:
        """Return whether this rank can contribute to the reduction again."""
        return self._backup is not None or not self.started

    def rewind(self) -> None:
        """Undo `finalize` and an aborted reduction."""
        if self._backup is not None:
            self.bucket.memory.copy_(self._backup)
            self.started = False
            self.found = []
            self._backup = None

    # -- after the reduction --------------------------------------------------------------------
    def read_header(self) -> list[tuple[bool, bool]]:
        """Return two flags for each gradient: whether any rank had it, and whether any rank lacked it.

        Header elements are only compared with zero, because a 16-bit float can't count many ranks exactly.
        """
        header: list[float | complex] = self.bucket.header.tolist()
        count = len(self.inside)
        self.asked = [*map(bool, header[-_REQUESTS:])]
        if all(header[:count]) and not any(header[count : 2 * count]):
            return self.bucket.complete
        return [(had != 0, lacked != 0) for had, lacked in zip(header[:count], header[count : 2 * count], strict=True)]

    def assign_grads(self, saved: SavedGradients) -> None:
        """Assign the means to p.grad; a gradient that no rank had remains unchanged."""
        bucket = self.bucket
        owned = saved.owned
        places = list(zip(bucket.indices, bucket.parameters, bucket.views, self.found, strict=True))
        try:
            for index, parameter, view, (had, _) in places:
                if had:
                    parameter.grad = owned.get(index, view)
                else:
                    saved.restore([index])
        except RuntimeError as error:
            raise RuntimeError(
                f"averaged gradients no longer fit the parameters among {bucket.name}: the model's dtype or device "
                "has changed. Call the averager's remove() before such a change, and create a new averager after it"
            ) from error
        # Write to the caller's tensors last: they may hold the only copy of the earlier gradients, which must be
        # restored if an assignment above raises.
        filled = [(owned[i], view) for i, _, view, (had, _) in places if had and i in owned] if owned else []
        if filled:
            torch._foreach_copy_([grad for grad, _ in filled], [view for _, view in filled])
        for slot, graph in self._graphs.items():
            if self.found[slot][0]:
                # Copy the mean into the gradient in place, so that the gradient keeps this rank's graph.
                graph.detach().copy_(bucket.views[slot])
                bucket.parameters[slot].grad = graph

    def add_late(self) -> None:
        """Add late gradients to the means, so that another reduction includes them."""
        bucket = self.bucket
        for slot, (view, parameter) in enumerate(zip(bucket.views, bucket.parameters, strict=True)):
            grad = parameter.grad
            if grad is not None:
                if self._factor:
                    view.add_(self._plain(slot, grad), alpha=self._factor)
                parameter.grad = None
        # All ranks have the same means, so averaging again leaves them unchanged and adds the mean of the late
        # gradients.
        bucket.memory.mul_(bucket.scale)


def _chunks(lengths: Sequence[int], least: int) -> list[Sequence[int]]:
    """Return slot ranges of at least `least` bytes each, and finally one range of all slots.

    Gradients may arrive in any order; the last range includes those that arrive after their own range was copied.
    """
    chunks: list[Sequence[int]] = []
    begin = nbytes = 0
    for slot, length in enumerate(lengths):
        nbytes += length
        if nbytes >= least and (slot + 1 < len(lengths) or not least):
            chunks.append(range(begin, slot + 1))
            begin = slot + 1
            nbytes = 0
    return [*chunks, range(len(lengths))]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.data_ptr() == other.data_ptr() and all(a == b for n, a, b in strides if n > 1)


def _shaped(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view with the parameter's shape and, if the parameter's memory has no gaps, its strides."""
    strides = dense_strides(like)
    return part.view(like.shape) if strides is None else part.as_strided(like.shape, strides)
