"""A model that is given more parameters while its gradients are averaged: said at the next step, or ranks drift."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

__all__ = ["AdditionWatch"]


class AdditionWatch:
    """Notices parameters and modules that are put into a model. Costs nothing until some are.

    Args:
        model: What is watched.
        parameters: Those that it has.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> watch = AdditionWatch(model, model.parameters())
        >>> _ = model.append(torch.nn.Linear(1, 1))
        >>> watch.check()
        Traceback (most recent call last):
        ...
        RuntimeError: '1.weight' (and 1 more) was put into the model after its averager was made, and is not averaged...
        >>> watch.remove()
    """

    def __init__(self, model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
        self._model, self._known = model, frozenset(map(id, parameters))
        self._modules, self._changed = set(model.modules()), False
        self._handles: list[Any] = [
            register_module_parameter_registration_hook(self._registered),
            register_module_module_registration_hook(self._registered),
        ]

    def _registered(self, module: torch.nn.Module, name: str, what: object) -> None:
        # Torch calls it for every module that there is.
        if module in self._modules:
            self._changed = True

    def check(self) -> None:
        """`RuntimeError` if the model has a parameter that needs a gradient and was not there."""
        if not self._changed:
            return
        self._modules = set(self._model.modules())
        unknown = [(name, p) for name, p in self._model.named_parameters() if id(p) not in self._known]
        # What is frozen may thaw.
        self._changed = bool(unknown)
        new = [name for name, p in unknown if p.requires_grad]
        if new:
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            raise RuntimeError(
                f"{new[0]!r}{more} was put into the model after its averager was made, and is not averaged. Call "
                "remove() on the averager, and make another one of the model as it is now"
            )

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
