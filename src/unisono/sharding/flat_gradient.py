"""Gradients of flat parameters: whole until they are averaged, then each rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from unisono.core.staging import OneStream
from unisono.core.types import Work
from unisono.errors import CommError
from unisono.sharding.comms import ShardComms
from unisono.sharding.shard_optimizer import Piece
from unisono.utils.layout import FlatLayout

__all__ = ["FlatGradient"]


class FlatGradient:
    """Gradient of flat parameters.

    Gradients are taken one by one, reduced together, and committed when the backward pass has succeeded on all ranks.

    Args:
        layout: Places of the parameters, and of padding after them.
        comms: The ranks that share them.
        dtype: Dtype of the message.

    Attributes:
        arrived: Indices of the parameters whose gradient was taken in the running pass and is not reduced yet.
        taken: Indices of the parameters whose gradient is not reduced yet.
        reduced: Indices of those whose gradient is reduced, or is being reduced, and not committed.
    """

    def __init__(self, layout: FlatLayout, comms: ShardComms, dtype: torch.dtype) -> None:
        self._layout, self._comms, self._dtype = layout, comms, dtype
        self._work: Work | None = None
        self.drop()

    def drop(self) -> None:
        """Forget all that is not committed."""
        if self._work is not None:
            with suppress(CommError):
                self._work.wait()
        self._work = None
        self._whole: torch.Tensor | None = None
        self._new: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self.arrived: set[int] = set()
        self.taken: set[int] = set()
        self.reduced: set[int] = set()

    def move_to(self, layout: FlatLayout) -> None:
        """Drop all, and be of another number of ranks."""
        self.drop()
        self._layout = layout

    def take(self, index: int, grad: torch.Tensor) -> None:
        """Add a parameter's gradient of this rank. `RuntimeError` if they arrive on several streams."""
        if self._whole is None:
            self._stream = OneStream([grad.device])
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

    def start_reduce(self, *, async_op: bool) -> None:
        """Begin to average what was taken over all ranks. Collective."""
        self.finish_reduce()
        whole, self._whole = self._whole, None
        assert whole is not None
        ends = [*self._layout.offsets[1:], self._layout.total]
        for index, (start, end) in enumerate(zip(self._layout.offsets, ends, strict=True)):
            if index not in self.taken:
                whole[start:end].zero_()
        self.reduced |= self.taken
        self.taken, self.arrived = set(), set()
        if self._comms.size == 1:
            # Its part is the whole, and so is the average.
            self._new = whole
            return
        self._new = whole.new_empty(self._layout.part)
        if async_op:
            self._work = self._comms.data.reduce_scatter_single(self._new, whole, "avg", async_op=True)
        else:
            self._comms.data.reduce_scatter_single(self._new, whole, "avg")

    def finish_reduce(self) -> None:
        """Wait for the last reduction."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
        if self._new is not None:
            new, self._new = self._new, None
            self._sum = new if self._sum is None else self._sum.add_(new)

    def commit(self, pieces: Sequence[Piece]) -> None:
        """Add what was reduced to the gradients of this rank's part: the pass has succeeded on all ranks.

        Args:
            pieces: This rank's slice of each parameter.
        """
        self.finish_reduce()
        begin = self._comms.rank * self._layout.part
        for index in sorted(self.reduced):
            assert self._sum is not None
            tensor = pieces[index].tensor
            start = max(0, self._layout.offsets[index] + pieces[index].start - begin)
            grad = self._sum[start : start + len(tensor)].to(tensor.dtype)
            tensor.grad = grad if tensor.grad is None else tensor.grad.add_(grad)
        self._sum, self.reduced = None, set()
