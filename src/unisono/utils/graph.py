"""Queries of the recorded autograd graph: when a backward pass reaches an output, and where it leads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from unisono.utils.backward_pass import will_run

__all__ = ["adds_to_leaves", "watch_outputs"]


def watch_outputs(returned: Any, arrived: Callable[[torch.Tensor], None]) -> int:
    """Call `arrived` when a backward pass reaches an output of a model. Return the number of watched tensors.

    Args:
        returned: A tensor, or a list, tuple, dict or dataclass of such.
        arrived: A hook of tensors.
    """
    parts: Iterable[Any] = ()
    if isinstance(returned, torch.Tensor):
        # A leaf has a hook of its own, and stays for many steps; what torch.func wraps is no part of a training step.
        if returned.grad_fn is not None and not torch._C._functorch.is_functorch_wrapped_tensor(returned):
            returned.register_hook(arrived)
            return 1
    elif isinstance(returned, (list, tuple, dict)):
        parts = returned.values() if isinstance(returned, dict) else returned
    elif is_dataclass(returned) and not isinstance(returned, type):
        parts = [getattr(returned, field.name, None) for field in fields(returned)]
    return sum(watch_outputs(part, arrived) for part in parts)


def adds_to_leaves(parameters: frozenset[int]) -> bool:
    """Return whether the backward pass that runs a tensor's hook adds to the gradient of a leaf below that tensor.

    `torch.autograd.grad` does not.

    Args:
        parameters: The `id` of each parameter; the other leaves count if none of these depends on the tensor.
    """
    leaf = _leaf(torch._C._current_autograd_node(), parameters)
    return leaf is None or will_run(leaf)


def _leaf(node: Any, parameters: frozenset[int]) -> Any:
    """A node that adds to a leaf's gradient: a parameter's, if the model's output depends on any."""
    seen, stack, found = {node}, [node], None
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None or following in seen:
                continue
            leaf = getattr(following, "variable", None)
            if id(leaf) in parameters:
                return following
            found = found if leaf is None else following
            seen.add(following)
            stack.append(following)
    return found
