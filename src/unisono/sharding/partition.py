"""Plan of a model's units: which parameters are gathered together, and which modules need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.jit import ScriptModule

from unisono.utils.parameters import Named, check_parameters, check_unclaimed

__all__ = ["UnitPlan", "UnitPolicy", "partition", "shardable"]

UnitPolicy = Iterable[type[nn.Module]] | Callable[[nn.Module], bool] | None

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_Path = tuple[nn.Module, ...]


@dataclass
class UnitPlan:
    """Parameters that are gathered together.

    Attributes:
        name: Name of the unit's module in the model; "" for the model.
        parameters: The unit's parameters, with their names in the model.
        modules: Modules that need these parameters.
    """

    name: str
    parameters: Named = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)


def partition(model: nn.Module, units: UnitPolicy = None) -> list[UnitPlan]:
    """Return the model's own unit, even if it has no parameters, and the other units that have parameters.

    A parameter or module shared by several units belongs to the nearest unit that encloses them all.

    Args:
        model: Any module.
        units: Classes of the modules to treat as units, or a predicate on modules. If None, the units are the elements
            of each `ModuleList` and `Sequential`.

    Raises:
        ValueError: No module is a unit.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> [(unit.name, [name for name, _ in unit.parameters]) for unit in partition(model)]
        [('', []), ('0', ['0.weight', '0.bias']), ('1', ['1.weight', '1.bias'])]
    """
    chosen = _elements(model) if units is None else {id(m) for m in model.modules() if _policy(units)(m)}
    if units is not None and not chosen:
        raise ValueError("no module of the model is a unit; `units` must be classes of some modules, or a predicate")
    homes: dict[int, _Path] = {}
    _visit(model, (model,), chosen, homes)
    owners: dict[int, _Path] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            path = homes[id(module)]
            owners[id(parameter)] = _common(owners.get(id(parameter), path), path)
    plans = {id(m): UnitPlan(name) for name, m in model.named_modules()}
    for name, parameter in model.named_parameters():
        plans[id(owners[id(parameter)][-1])].parameters.append((name, parameter))
    for module in model.modules():
        own = [owners[id(p)][-1] for p in module.parameters(recurse=False)]
        for unit in {id(m): None for m in (homes[id(module)][-1], *own)}:
            plans[unit].modules.append(module)
    return [plan for plan in plans.values() if plan.parameters or not plan.name]


def _policy(units: Iterable[type[nn.Module]] | Callable[[nn.Module], bool]) -> Callable[[nn.Module], bool]:
    if isinstance(units, Iterable):
        classes = tuple(units)
        return lambda module: isinstance(module, classes)
    return units


def _elements(model: nn.Module) -> set[int]:
    """Find the elements of lists of modules, except elements nested inside another element."""
    found = set()
    for child in model.children():
        if isinstance(model, _CONTAINERS) and not isinstance(child, _CONTAINERS):
            found.add(id(child))
        else:
            found |= _elements(child)
    return found


def _visit(module: nn.Module, path: _Path, chosen: set[int], homes: dict[int, _Path]) -> None:
    """Find the path of units that leads to each module."""
    if id(module) in chosen and module is not path[0]:
        path = (*path, module)
    known = homes.get(id(module))
    homes[id(module)] = path if known is None else _common(known, path)
    for child in module.children():
        _visit(child, path, chosen, homes)


def _common(one: _Path, two: _Path) -> _Path:
    """Return the common prefix of two paths of units."""
    length = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a is not b), min(len(one), len(two)))
    return one[:length]


def shardable(model: nn.Module) -> Named:
    """Return a model's parameters; raise `TypeError` or `ValueError` if the model cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, not a {type(model).__name__}")
    if any(isinstance(module, ScriptModule) for module in model.modules()):
        raise ValueError(
            "a ScriptModule takes no hooks, so it cannot be sharded. Shard the model before it is scripted"
        )
    named: Named = list(model.named_parameters())
    if not named:
        raise ValueError("the model has no parameters to shard")
    check_unclaimed(named)
    check_parameters(named)
    for name, parameter in named:
        if parameter.grad is not None:
            raise ValueError(f"{name!r} has a gradient. Call model.zero_grad(), then shard the model")
    return named
