"""A model that gets other parameters while its gradients are averaged: said at once, for no hook would tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["LoadWatch"]


class LoadWatch:
    """Raises at the end of a `load_state_dict(assign=True)` that puts new parameters in the place of known ones.

    Args:
        model: Its loads are watched, and those of its parts.
        parameters: The known ones.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> watch = LoadWatch(model, model.parameters())
        >>> incompatible = model.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
        >>> watch.remove()
    """

    def __init__(self, model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
        hook = _Hook(frozenset(map(id, parameters)))
        self._handles = [module.register_load_state_dict_post_hook(hook) for module in model.modules()]

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()


class _Hook:
    """It does nothing on copies of the model, pickled ones too: they are not averaged."""

    def __init__(self, known: frozenset[int] | None = None) -> None:
        self._known = known

    def __call__(self, module: torch.nn.Module, incompatible: Any) -> None:
        own = module.named_parameters(recurse=False)
        new = [] if self._known is None else [name for name, p in own if id(p) not in self._known]
        if new:
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            raise RuntimeError(
                f"load_state_dict(assign=True) has put a new parameter {new[0]!r}{more} into a "
                f"{type(module).__name__} whose gradients are averaged; the new one's would not be. Call remove() on "
                "the averager before, and make another one after it; or load without assign"
            )

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
