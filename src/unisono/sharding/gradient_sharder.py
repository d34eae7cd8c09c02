"""Hooks that average gradients during `backward()`, and keep this rank's part of them only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from unisono.errors import ClosedError, PeerLostError
from unisono.sharding.comms import ShardComms
from unisono.sharding.flat_parameters import ParameterBucket, ShardedGradient
from unisono.utils.backward_pass import BackwardPass

__all__ = ["GradientSharder"]


class GradientSharder:
    """Hooks on the parameters of buckets.

    A bucket is reduced when it and all before it have their gradients, or at the end of the pass: all ranks reduce all
    buckets in one order, whatever gradients they lack. A gradient that is in a bucket leaves a placeholder in p.grad,
    without memory of its own. Where the placeholder is replaced by None, the gradient is dropped.

    Args:
        buckets: Buckets of trained parameters, in the expected order of their gradients.
        comms: The ranks that average.

    Attributes:
        sync: Whether backward passes reduce.
    """

    def __init__(self, buckets: Sequence[ParameterBucket], comms: ShardComms) -> None:
        self._buckets, self._comms, self.sync = buckets, comms, True
        on_cpu = all(p.is_cpu for bucket in buckets for p in bucket.parameters)
        self._pass = BackwardPass(self._begin, self._end, self._fail, one_thread=on_cpu)
        self._next, self._syncing = 0, True
        self._problem: str | None = None
        self._handles: list[Any] = []
        self._placeholders = [[ShardedGradient.of(parameter) for parameter in bucket.parameters] for bucket in buckets]
        for number, bucket in enumerate(buckets):
            for slot, parameter in enumerate(bucket.parameters):
                self._handles += [
                    parameter.register_hook(partial(self._pass.arrive, slot)),
                    parameter.register_post_accumulate_grad_hook(partial(self._take, number, slot)),
                ]

    def _begin(self) -> None:
        error = self._comms.data.exception()
        if error is not None:
            if self.drop():
                raise error
            try:
                self._comms.replace()
            except PeerLostError as lost:
                if isinstance(error, ClosedError):
                    raise
                # The rank whose pass has failed does not repeat it.
                raise error from lost
        self._check_placeholders()
        self.follow_zero_grad()
        self._next, self._syncing = 0, self.sync
        for bucket, placeholders in zip(self._buckets, self._placeholders, strict=True):
            bucket.gradient.arrived.clear()
            for parameter, placeholder in zip(bucket.parameters, placeholders, strict=True):
                if parameter.grad is placeholder:
                    parameter.grad = None

    @torch.no_grad()
    def _take(self, number: int, slot: int, parameter: torch.Tensor) -> None:
        """Hook: a gradient has been added to p.grad."""
        bucket, grad = self._buckets[number], parameter.grad
        if grad is None:
            self._problem = (
                f"a hook has taken the gradient of {bucket.pieces[slot].name!r} away before it was averaged. Make the "
                "step after backward() has returned"
            )
            raise RuntimeError(self._problem)
        if grad.layout != torch.strided:
            raise ValueError(f"the gradient of {bucket.pieces[slot].name!r} is sparse, which cannot be sharded")
        if self._syncing and number < self._next:
            raise RuntimeError(
                f"{bucket.pieces[slot].name!r} got a second gradient in one backward pass when the first one had been "
                "averaged, as a shared parameter does under re-entrant checkpointing. Pass use_reentrant=False there"
            )
        bucket.gradient.take(slot, grad)
        parameter.grad = None
        while self._syncing and self._next < len(self._buckets) and self._is_full(self._buckets[self._next]):
            self._reduce()

    @staticmethod
    def _is_full(bucket: ParameterBucket) -> bool:
        return len(bucket.gradient.arrived) == len(bucket.parameters)

    def _reduce(self) -> None:
        bucket = self._buckets[self._next]
        gradient = bucket.gradient
        self._next += 1
        if not gradient.taken:
            # Other ranks may have gradients here: contribute zeros, which count as no gradient.
            gradient.take(0, torch.zeros_like(bucket.parameters[0]))
            gradient.taken.clear()
        if self._next > 1:
            # At most one whole bucket is on its way.
            self._buckets[self._next - 2].gradient.finish_reduce()
        gradient.start_reduce(async_op=self._comms.data.overlaps)

    @torch.no_grad()
    def _end(self) -> None:
        if self._syncing:
            while self._next < len(self._buckets):
                self._reduce()
            for bucket in self._buckets:
                bucket.gradient.commit(bucket.pieces)
        for bucket, placeholders in zip(self._buckets, self._placeholders, strict=True):
            for slot, (parameter, placeholder) in enumerate(zip(bucket.parameters, placeholders, strict=True)):
                if slot in bucket.gradient.taken or bucket.pieces[slot].tensor.grad is not None:
                    parameter.grad = placeholder

    def _fail(self) -> None:
        """Drop the gradients of this step: another rank may have a part of the pass that raised."""
        self.drop()
        reason = "a backward pass failed there, so all ranks drop the gradients of this step. Repeat it"
        self._comms.abort(self._problem or reason)
        self._problem = None

    # -- from step to step ----------------------------------------------------------------------
    def follow_zero_grad(self) -> None:
        """Drop gradients whose placeholder was removed, as by `model.zero_grad()`."""
        for bucket, placeholders in zip(self._buckets, self._placeholders, strict=True):
            for slot, (parameter, placeholder) in enumerate(zip(bucket.parameters, placeholders, strict=True)):
                if parameter.grad is not placeholder:
                    bucket.pieces[slot].tensor.grad = None
                    bucket.gradient.taken.discard(slot)

    def _check_placeholders(self) -> None:
        """`RuntimeError` if p.grad is not of a pass."""
        for bucket, placeholders in zip(self._buckets, self._placeholders, strict=True):
            for parameter, placeholder, piece in zip(bucket.parameters, placeholders, bucket.pieces, strict=True):
                if parameter.grad is not None and parameter.grad is not placeholder:
                    raise RuntimeError(
                        f"p.grad of {piece.name!r} was set, but sharded gradients come from backward() only. Set it to "
                        "None, or create the optimizer with shard_gradients=False"
                    )

    def check_reduced(self) -> None:
        """`RuntimeError` if gradients wait for a pass outside of `no_sync`, or are not of a pass."""
        self._check_placeholders()
        if any(bucket.gradient.taken for bucket in self._buckets):
            raise RuntimeError(
                "gradients of backward passes in no_sync() are not averaged yet. Run the last backward() of a step "
                "outside of no_sync()"
            )

    def drop(self) -> bool:
        """Drop all gradients. Return whether there were any."""
        held = False
        for bucket in self._buckets:
            gradient = bucket.gradient
            held = held or bool(gradient.taken or gradient.reduced)
            gradient.drop()
            for parameter, piece in zip(bucket.parameters, bucket.pieces, strict=True):
                held = held or piece.tensor.grad is not None
                parameter.grad = piece.tensor.grad = None
        return held

    def remove(self) -> None:
        """Remove the hooks, and drop all gradients."""
        for handle in self._handles:
            handle.remove()
        self._pass.forget()
        self.drop()
