"""Hooks that run when a model is loaded: through torch, from a checkpoint read in place, or from another rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, finalize

import torch

__all__ = ["LoadHook", "announce_load", "follow_loads"]

_Follow = Callable[[str, torch.nn.Module], None]


class LoadHook:
    """Hook that runs after a module's `load_state_dict`; does nothing on copies (or unpickled copies) of the module.

    Args:
        name: Name of the module in the model.
        call: Method to call with the name and the module. The hook holds only a weak reference to the method, so that a
            model does not keep the method's object alive.
    """

    def __init__(self, name: str = "", call: _Follow | None = None) -> None:
        self._name = name
        self._call = None if call is None else WeakMethod(call)

    def __call__(self, module: torch.nn.Module, _keys: Any = None) -> None:
        call = None if self._call is None else self._call()
        if call is not None:
            call(self._name, module)

    def __reduce__(self) -> tuple[type[LoadHook], tuple[()]]:
        return LoadHook, ()


def follow_loads(model: object, follower: Any, call: _Follow) -> None:
    """Call a method whenever a module's tensors are loaded, either with the whole model or separately.

    Args:
        model: The model. Loads of scripted modules in the model are not detected.
        follower: Object whose deletion removes the hooks.
        call: Method of `follower`, called with the name of the module in the model, and the module.

    Example:
        >>> class Names(list):
        ...     def add(self, name, module):
        ...         self.append(name)
        >>> model, names = torch.nn.Sequential(torch.nn.Linear(1, 1)), Names()
        >>> follow_loads(model, names, names.add)
        >>> _ = model[0].load_state_dict(model[0].state_dict())
        >>> names
        ['0']
    """
    for name, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        # A scripted module does not accept hooks.
        if not isinstance(module, torch.jit.ScriptModule):
            handle = module.register_load_state_dict_post_hook(LoadHook(name, call))
            finalize(follower, handle.remove)


def announce_load(model: object) -> None:
    """Notify a model's followers that its tensors were written without a call to `load_state_dict`.

    Args:
        model: A module; anything else has no followers.
    """
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        for hook in tuple(module._load_state_dict_post_hooks.values()):
            if isinstance(hook, LoadHook):
                hook(module)
