"""The anchor (a common copy of the parameters) and the outer optimizer that updates it with the ranks' mean change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.compression.codec import Spec

__all__ = ["Anchor", "Outer", "OuterUpdate"]

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""Function that takes the anchor's tensors and returns the outer optimizer."""


@dataclass(frozen=True)
class OuterUpdate:
    """Option of `PeriodicAverager`: an outer optimizer updates a common anchor with the ranks' mean change.

    Provisional: it may change in any minor version, without a deprecation.

    Args:
        optimizer: Function that takes the anchor's tensors and returns the outer optimizer.
        anchor_dtype: Dtype of the anchor's real tensors; if None, float32, or the parameter's dtype if that is wider.
        compression: A codec from `un.compression` for averaging the changes. Complex parameters are sent uncompressed.

    Raises:
        ValueError: `anchor_dtype` is not a real floating-point dtype.

    Example:
        >>> def sgd(anchor):
        ...     return torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
        >>> with un.init() as comm:
        ...     outer = un.gradients.OuterUpdate(sgd, compression="int8")
        ...     averager = un.gradients.PeriodicAverager(torch.nn.Linear(2, 1), comm, every=50, outer=outer)
        ...     averager.anchor[0].dtype
        torch.float32
    """

    optimizer: Outer
    anchor_dtype: torch.dtype | None = None
    compression: Spec | None = None

    def __post_init__(self) -> None:
        if self.anchor_dtype is not None and not self.anchor_dtype.is_floating_point:
            raise ValueError(f"anchor_dtype must be a dtype of real numbers, not {self.anchor_dtype}")


class Anchor:
    """Copies of the parameters as they were when last equal on all ranks, and the optimizer that updates the copies.

    Args:
        parameters: The parameters.
        update: The option that configures the outer optimizer.

    Attributes:
        tensors: The anchor's tensors, one for each parameter.
        outer: The outer optimizer.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], update: OuterUpdate) -> None:
        # By default, use at least float32: in a 16-bit dtype, small outer steps would be rounded away.
        self.tensors: list[torch.Tensor] = [_wide(p, update.anchor_dtype) for p in parameters]
        self.outer: torch.optim.Optimizer = update.optimizer(self.tensors)

    def described(self) -> str:
        """Return the optimizer's class and settings as text, for comparison between ranks."""
        settings = {k: v for k, v in self.outer.defaults.items() if isinstance(v, bool | int | float | str | tuple)}
        return f"{type(self.outer).__name__}({', '.join(f'{key}={value}' for key, value in settings.items())})"

    @property
    def rates(self) -> list[float]:
        """The learning rates of the outer optimizer."""
        return [float(group["lr"]) for group in self.outer.param_groups if "lr" in group]

    def step(self, part: list[torch.Tensor], changes: list[torch.Tensor], rates: Sequence[float] = ()) -> None:
        """Update part of the anchor, using `changes` as its gradients and `rates`, if given, as learning rates."""
        for group, rate in zip(self.outer.param_groups, rates, strict=False):
            group["lr"] = rate
        for there, change in zip(part, changes, strict=True):
            there.grad = change
        self.outer.step()
        # Free the gradients: the optimizer skips tensors without a gradient, so the next fragment's step does not
        # change this fragment's part of the anchor.
        self.outer.zero_grad()

    def look_ahead(
        self, part: list[torch.Tensor], here: list[torch.Tensor], changes: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Set this rank's parameters to the result predicted from its own contribution, and return the prediction.

        The anchor and the outer optimizer remain unchanged: the prediction is computed on temporary copies of their
        tensors.
        """
        settings = [dict(group) for group in self.outer.param_groups]
        places = [there.data for there in part]
        states = [self.outer.state.get(there) for there in part]
        # Take the step on copies of the tensors and states: this takes a third less processor time in the training
        # thread than taking it on the originals and restoring them from copies. The optimizer finds a state by its
        # tensor object, so replace `.data` only.
        for there, state in zip(part, states, strict=True):
            there.data = there.clone()
            self.outer.state[there] = copy.deepcopy(state or {})
        self.step(part, changes)
        # Restore the parameter groups: some optimizers store a step count or a changed learning rate in them.
        for group, values in zip(self.outer.param_groups, settings, strict=True):
            group.clear()
            group.update(values)
        expected = []
        for parameter, there, place, state in zip(here, part, places, states, strict=True):
            expected.append(there.data.to(parameter.dtype))
            parameter.copy_(expected[-1])
            there.data = place
            self.outer.state[there] = state or {}
        return expected

    def load(self, index: int, value: torch.Tensor) -> bool:
        """Replace the anchor's copy of a parameter with a new value; return False if the two are already equal."""
        value = value.to(self.tensors[index])
        if torch.equal(self.tensors[index], value):
            return False
        self.tensors[index].copy_(value)
        # Drop the outer momentum: it was computed from the old weights, and would move the loaded weights.
        self.outer.state.pop(self.tensors[index], None)
        return True


def _wide(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a copy of a parameter in the dtype of its anchor."""
    if dtype is None or tensor.is_complex():
        dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.detach().to(dtype, copy=True)
