"""Memory of a user's for gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["OwnMemory"]

_GAP = 7.0
"""Value of the memory between gradients, from the beginning to the end."""


class OwnMemory:
    """Tensors that a user has made p.grad, or that torch has: they stay p.grad while passes add to it.

    Args:
        parameters: Of the model, by name.
        layout: As `Case.memory`.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], layout: str) -> None:
        self._parameters, self._layout = parameters, layout
        self._kept = dict[str, tuple[torch.Tensor, int]]()
        self._views = dict[str, torch.Tensor]()
        self._gaps = list[tuple[torch.Tensor, torch.Tensor]]()

    def put(self, names: Iterable[str]) -> None:
        """Make these gradients views of the user's memory, which hold zeros."""
        if not self._views:
            for dtype in dict.fromkeys(p.dtype for p in self._parameters.values()):
                self._allot({name: p for name, p in self._parameters.items() if p.dtype == dtype}, dtype)
        for name in names:
            self._views[name].zero_()
            self._keep(name, self._views[name])

    def _allot(self, parameters: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
        if self._layout == "apart":
            self._views.update((name, torch.zeros_like(p, requires_grad=False)) for name, p in parameters.items())
            return
        gap, step = 3 if self._layout == "offset" else 0, 2 if self._layout == "strided" else 1
        flat = torch.full((sum(gap + p.numel() * step for p in parameters.values()),), _GAP, dtype=dtype)
        between = torch.ones(flat.shape, dtype=torch.bool)
        end = 0
        for name, parameter in parameters.items():
            start = end + gap
            end = start + parameter.numel() * step
            between[start:end:step] = False
            self._views[name] = flat[start:end:step].view(parameter.shape)
        self._gaps.append((flat, between))

    def give(self, name: str, numbers: torch.Tensor) -> None:
        """Set a gradient to some numbers, in the user's memory where it is there."""
        grad = self._parameters[name].grad
        if grad is not None and self.holds(name):
            grad.copy_(numbers)
        else:
            self._keep(name, numbers)

    def adopt(self, before: Iterable[str]) -> None:
        """Keep the gradients that torch has made in a pass alone, unless they were there before."""
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            if name not in before and grad is not None and not grad.requires_grad and grad.layout == torch.strided:
                self._keep(name, grad)

    def _keep(self, name: str, grad: torch.Tensor) -> None:
        self._parameters[name].grad = grad
        self._kept[name] = grad, grad.data_ptr()

    def holds(self, name: str) -> bool:
        """Return whether p.grad is the tensor that is kept for it, in its own memory."""
        kept, address = self._kept.get(name, (None, 0))
        return kept is not None and self._parameters[name].grad is kept and kept.data_ptr() == address

    def holding(self) -> list[str]:
        """The parameters whose p.grad is kept, and "" if no memory beside gradients was written."""
        names = [name for name in self._parameters if self.holds(name)]
        return names if any((flat[gaps] != _GAP).any() for flat, gaps in self._gaps) else ["", *names]
