"""Changes of a model that an averager has to answer with an error, because its gradients would not be averaged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from averager_graphs import Graph
from averager_programs import WIDTH
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

__all__ = ["CHANGES", "HARMLESS"]


def _other(model: Graph) -> nn.Parameter:
    """Another weight for layer 0."""
    return nn.Parameter(torch.full((WIDTH, WIDTH), 0.3, dtype=model.scales[0].dtype))


def _append(model: Graph) -> None:
    layer = nn.Linear(WIDTH, WIDTH, dtype=model.scales[0].dtype)
    model.extra.append(layer)


def _freeze_and_append(model: Graph) -> None:
    model.requires_grad_(False)
    _append(model)


def _freeze_and_wrap(model: Graph) -> None:
    model.requires_grad_(False)
    model.layers[0] = nn.Sequential(model.layers[0], nn.Linear(WIDTH, WIDTH, dtype=model.scales[0].dtype))


def _weight_norm(model: Graph) -> None:
    weight_norm(model.layers[0])


def _swap(model: Graph) -> None:
    torch.utils.swap_tensors(model.get_parameter("layers.0.weight"), _other(model))


def _replace(model: Graph) -> None:
    model.layers[0].weight = _other(model)


def _replace_in_dict(model: Graph) -> None:
    model.layers[0]._parameters["weight"] = _other(model)


def _replace_module(model: Graph) -> None:
    model.layers[0] = nn.Linear(WIDTH, WIDTH, bias=False, dtype=model.scales[0].dtype)


def _load(model: Graph) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def _convert(model: Graph) -> None:
    model.float() if model.scales[0].dtype == torch.float64 else model.double()


def _convert_by_overwriting(model: Graph) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        _convert(model)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def _by_swapping(convert: Callable[[Graph], object], model: Graph) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        convert(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _exchange(model: Graph) -> None:
    """Give the first parameter that has an equal the gradient of that one."""
    found: dict[object, torch.Tensor] = {}
    for parameter in model.parameters():
        kind = parameter.shape, parameter.dtype
        if parameter.grad is None or parameter.grad.is_sparse or parameter.grad.requires_grad:
            continue
        other = found.setdefault(kind, parameter)
        if other is not parameter:
            other.grad, parameter.grad = parameter.grad, other.grad
            return


CHANGES: dict[str, Callable[[Graph], None]] = {
    "append": _append,
    "freeze and append": _freeze_and_append,
    "freeze and wrap": _freeze_and_wrap,
    "weight_norm": _weight_norm,
    "swap": _swap,
    "replace": _replace,
    "replace in dict": _replace_in_dict,
    "replace module": _replace_module,
    "load": _load,
    "conversion": _convert,
    "conversion by overwriting": _convert_by_overwriting,
    "conversion by swapping": partial(_by_swapping, _convert),
    "conversion to the same by swapping": partial(_by_swapping, Graph.cpu),
    "exchange": _exchange,
}
"""By name. The switches of conversions are the whole process's, so these are not for ranks that are threads."""

HARMLESS = frozenset({"exchange"})
"""Changes after which the next pass may also succeed, if its gradients are right."""
