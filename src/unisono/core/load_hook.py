"""Hooks that follow what a model loads: by torch, from a checkpoint that is read into place, or from another rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, finalize

import torch

__all__ = ["LoadHook", "announce_load", "follow_loads"]

_Follow = Callable[[str, torch.nn.Module], None]


class LoadHook:
    """Hook after a module's `load_state_dict` that does nothing on copies of the module, pickled ones too.

    Args:
        name: Name of the module in the model.
        call: Method to call with that and the module. It is held weakly: a model keeps nobody alive that follows it.
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
    """Call a method after each module of a model, loaded as a whole or by itself, has got other values for its tensors.

    Args:
        model: The model; of anything but a module, and of one that is scripted, nothing is known.
        follower: An object. Hooks end when it does.
        call: A method of it; called with the name of the module in the model, and the module.

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
        # One that is scripted takes no hooks.
        if not isinstance(module, torch.jit.ScriptModule):
            handle = module.register_load_state_dict_post_hook(LoadHook(name, call))
            finalize(follower, handle.remove)


def announce_load(model: object) -> None:
    """Let those that follow a model know that its tensors were written without its `load_state_dict`.

    Args:
        model: A module; of anything else nothing is known.
    """
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        for hook in tuple(module._load_state_dict_post_hooks.values()):
            if isinstance(hook, LoadHook):
                hook(module)
