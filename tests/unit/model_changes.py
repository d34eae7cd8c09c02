"""Ways to replace parameters of a model whose gradients are averaged, and ways to change a model that keep them."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable

import torch
from averager_helpers import sample, weight
from torch import nn
from torch.nn.utils import parametrizations, parametrize

__all__ = ["CHANGES", "HARMLESS", "NAME", "prepared"]

NAME = r"'?[0-3]\.(weight|parametrizations)"
"""The name of a parameter that a change in CHANGES took away or brought."""

_setting = threading.Lock()

Change = Callable[[nn.Sequential], object]


def _other(model: nn.Sequential, index: int = 1) -> nn.Parameter:
    return nn.Parameter(weight(model, index).detach() + 1.0)


def _set_item(model: nn.Sequential) -> None:
    model[1]._parameters["weight"] = _other(model)


def _set_attribute(model: nn.Sequential) -> None:
    model[1].weight = _other(model)


def _delete_and_set(model: nn.Sequential) -> None:
    other = _other(model)
    del model[1].weight
    model[1].weight = other


def _swap_tensors(model: nn.Sequential) -> None:
    torch.utils.swap_tensors(weight(model, 1), _other(model))


def _convert_by_swap(model: nn.Sequential) -> None:
    # The setting belongs to the process, and ranks may be threads.
    with _setting:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.float()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


def _convert_by_overwriting(model: nn.Sequential) -> None:
    with _setting:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            model.float()
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)


def _convert(model: nn.Sequential) -> None:
    with _setting:
        model.to(torch.float32)


def _weight_norm_by_hook(model: nn.Sequential) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[1])


def _weight_norm(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[1])


def _remove_weight_norm(model: nn.Sequential) -> None:
    parametrize.remove_parametrizations(model[1], "weight")


def _load_and_assign(model: nn.Sequential) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def _load_and_assign_a_part(model: nn.Sequential) -> None:
    model[1].load_state_dict({"weight": weight(model, 1).detach().clone()}, assign=True)


def _train_a_new_layer_alone(model: nn.Sequential) -> None:
    model.requires_grad_(False)
    model.append(nn.Linear(4, 4, bias=False).double())


def _append_a_lazy_layer(model: nn.Sequential) -> None:
    model.append(nn.LazyLinear(4, bias=False, dtype=torch.float64))


CHANGES: dict[str, Change] = {
    "set in _parameters": _set_item,
    "set as attribute": _set_attribute,
    "deleted and set": _delete_and_set,
    "swap_tensors": _swap_tensors,
    "converted": _convert,
    "converted by swap": _convert_by_swap,
    "converted by overwriting": _convert_by_overwriting,
    "weight_norm by hook": _weight_norm_by_hook,
    "weight_norm": _weight_norm,
    "weight_norm removed": _remove_weight_norm,
    "loaded and assigned": _load_and_assign,
    "loaded and assigned in part": _load_and_assign_a_part,
    "a new layer trained alone": _train_a_new_layer_alone,
    "a lazy layer appended": _append_a_lazy_layer,
}


def prepared(model: nn.Sequential, change: str) -> nn.Sequential:
    """The model as it has to be for this change, before it has an averager."""
    if change == "weight_norm removed":
        _weight_norm(model)
    return model


def _load(model: nn.Sequential) -> None:
    model.load_state_dict({name: tensor + 1.0 for name, tensor in model.state_dict().items()})


def _set_data(model: nn.Sequential) -> None:
    weight(model, 1).data = torch.ones(4, 4, dtype=torch.float64)


def _freeze_and_thaw(model: nn.Sequential) -> None:
    model.requires_grad_(False)
    model(sample(0))
    model.requires_grad_(True)


def _freeze_a_layer(model: nn.Sequential) -> None:
    model[1].requires_grad_(False)


def _append_a_frozen_layer(model: nn.Sequential) -> None:
    layer = nn.Linear(4, 4, bias=False).double().requires_grad_(False)
    nn.init.eye_(layer.weight)
    model.append(layer)


def _train_a_copy(model: nn.Sequential) -> None:
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(sample(0)).sum().backward()
        _set_item(other)
        _train_a_new_layer_alone(other)
        other(sample(0)).sum().backward()


def _call_with_other_tensors(model: nn.Sequential) -> None:
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, sample(0)).sum().backward()


def _call_with_parameters_of_another_model(model: nn.Sequential) -> None:
    others: dict[str, torch.Tensor] = dict(copy.deepcopy(model).named_parameters())
    torch.func.functional_call(model, others, sample(0)).sum().backward()


def _call_a_part_with_another_parameter(model: nn.Sequential) -> None:
    part = model[1]
    torch.func.functional_call(part, {"weight": _other(model)}, sample(0)).sum().backward()


def _evaluate(model: nn.Sequential) -> None:
    with torch.no_grad():
        model.eval()(sample(0))
    model.train()


def _tie_two_layers(model: nn.Sequential) -> None:
    model[2].weight = weight(model, 0)


def _tie_a_new_name(model: nn.Sequential) -> None:
    model.register_parameter("again", weight(model, 0))


HARMLESS: dict[str, Change] = {
    "loaded": _load,
    "data set": _set_data,
    "frozen and thawed": _freeze_and_thaw,
    "a layer frozen": _freeze_a_layer,
    "a frozen layer appended": _append_a_frozen_layer,
    "a copy trained": _train_a_copy,
    "called with other tensors": _call_with_other_tensors,
    "called with parameters of another model": _call_with_parameters_of_another_model,
    "a part called with another parameter": _call_a_part_with_another_parameter,
    "evaluated": _evaluate,
    "two layers tied": _tie_two_layers,
    "a new name tied": _tie_a_new_name,
}
