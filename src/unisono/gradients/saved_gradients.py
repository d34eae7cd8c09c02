"""Gradients from before a backward pass, so that a pass that fails can be undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["SavedGradients"]


class SavedGradients:
    """Gradients from before the running pass.

    They are set aside, and p.grad is None meanwhile, so that what the pass computes comes alone: nothing is copied.
    A copy is made only where p.grad stays, for hooks of the user's that look at it, and of memory that the pass writes.

    Args:
        parameters: All of the averager's.
        stays: Indices of parameters whose p.grad is left in place.
        lies_in_buckets: Whether a gradient of the parameter with this index lies in a bucket's memory; `RuntimeError`
            if that is another one's place.

    Attributes:
        aside: By index, what is to be added to what the pass computes.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        stays: set[int],
        lies_in_buckets: Callable[[int, torch.Tensor], bool],
    ) -> None:
        self._parameters, self._stays, self._lies_in_buckets = parameters, stays, lies_in_buckets
        self.clear()

    def clear(self) -> None:
        """Forget all: the pass has ended."""
        self.aside: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] | None = None

    def save(self) -> None:
        """Set all aside. A pass begins."""
        held = [(i, p, g) for i, p in enumerate(self._parameters) if (g := p.grad) is not None and p.requires_grad]
        self.aside, self._before = {}, {}
        if not held:
            return
        within = {index for index, _, grad in held if self._lies_in_buckets(index, grad)}
        for index, parameter, grad in held:
            # What has a graph, or is sparse, is for torch to add to.
            stays = index in self._stays or grad.requires_grad or grad.layout != torch.strided
            with torch.enable_grad():
                self._before[index] = grad.clone() if stays or index in within else grad
            if not stays:
                self.aside[index] = self._before[index]
                parameter.grad = None

    def merge(self) -> None:
        """Put what was set aside back into p.grad, with what has come since."""
        for index, earlier in self.aside.items():
            new = self._parameters[index].grad
            with torch.set_grad_enabled(new is not None and new.requires_grad):
                total = earlier if new is None else earlier + new if new.requires_grad else earlier.add_(new)
            self._parameters[index].grad = total
        self.clear()

    def restore(self) -> None:
        """Make each p.grad what it was when `save` was called."""
        if self._before is None:
            return
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                parameter.grad = self._before.get(index)
        self.clear()
