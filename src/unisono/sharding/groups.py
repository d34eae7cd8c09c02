"""Parameters and their groups, as optimizers of torch take them, with names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unisono.core.tensors import check_apart, check_tensor
from unisono.utils.bucket_plan import Named, check_parameters, named_parameters

__all__ = ["check_shardable", "named_groups"]


def named_groups(model: torch.nn.Module | Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups whose "params" are pairs of name and parameter.

    Args:
        model: A module, parameters, pairs of name and parameter, or groups of either.

    Raises:
        TypeError: It is something else.
        ValueError: It is empty, or a parameter is in it twice.

    Example:
        >>> from unisono.sharding.groups import named_groups
        >>> [[name for name, _ in group["params"]] for group in named_groups(torch.nn.Linear(2, 1))]
        [['weight', 'bias']]
    """
    if isinstance(model, torch.nn.Module | torch.Tensor):
        groups: list[dict[str, Any]] = [{"params": named_parameters(model)}]
    else:
        given = list(model)
        grouped = bool(given) and isinstance(given[0], Mapping)
        groups = [dict(group) for group in given] if grouped else [{"params": given}]
        for number, group in enumerate(groups):
            listed = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
            where = f"group {number}, " if grouped else ""
            group["params"] = [_named(entry, f"{where}parameter {i}") for i, entry in enumerate(listed)]
    seen: set[int] = set()
    for name, parameter in (pair for group in groups for pair in group["params"]):
        if id(parameter) in seen:
            raise ValueError(f"{name!r} is among the parameters twice")
        seen.add(id(parameter))
    if not seen:
        raise ValueError("model has no parameters")
    return groups


def _named(entry: Any, place: str) -> tuple[str, torch.Tensor]:
    name, parameter = entry if isinstance(entry, tuple) else (place, entry)
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name} is a {type(parameter).__name__}, not a tensor")
    return name, parameter


def check_shardable(named: Named, master_dtype: torch.dtype | None) -> None:
    """Raise unless each parameter can become a view of a flat tensor.

    Raises:
        ValueError: One is uninitialized, no leaf, sparse, shares memory with another, or has a dtype that
            `master_dtype` cannot stand for; names it.
        TypeError: `master_dtype` is no floating-point dtype.
    """
    if master_dtype is not None and not master_dtype.is_floating_point:
        raise TypeError(f"master_dtype must be a floating-point dtype, not {master_dtype}")
    check_parameters(named)
    for name, parameter in named:
        check_tensor(parameter, repr(name), frozenset([parameter.device.type]), written=True)
        if master_dtype is not None and parameter.is_complex():
            raise ValueError(f"{name!r} is {parameter.dtype}, for which there is no master_dtype")
    check_apart([(repr(name), parameter) for name, parameter in named])
