"""Units: modules whose parameters are gathered, reduced and freed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.sharding.comms import ShardComms
from unisono.sharding.flat_parameters import FlatParameters
from unisono.utils.parameters import Named, check_parameters, check_unclaimed

__all__ = ["ForwardCall", "Unit", "UnitPlan", "UnitPolicy", "make_units", "partition", "recut_units", "shardable"]


class ForwardCall:
    """One forward of a unit, as its backward sees it.

    Attributes:
        inputs: Number of inputs that get a gradient.
        left: Number of those that have none yet.
    """

    def __init__(self) -> None:
        self.inputs = self.left = 0


class Unit:
    """Parameters that are gathered together, and the modules that are running and need them.

    Args:
        plan: Its name, modules and parameters.
        flats: Its parameters, by dtype, device and `requires_grad`.

    Attributes:
        name, modules, flats: As passed.
        running: The modules whose forward is running, the innermost one last.
        call: The newest forward call.
        held: Whether its parameters are not to be freed.
        open: The forward calls that the running backward pass has reached and not left.
        frees_after_gradients: Whether backward needs no parameter once all have their gradients: none is frozen.
    """

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters]) -> None:
        self.name = plan.name
        self.modules = plan.modules
        self.flats = flats
        self.running: list[nn.Module] = []
        self.held = False
        self.call = ForwardCall()
        self.open: set[ForwardCall] = set()
        self._trained = [(flat, flat.gradient) for flat in flats if flat.gradient is not None]
        self.frees_after_gradients = len(self._trained) == len(flats)

    @property
    def gathered(self) -> bool:
        """Return whether its parameters can be used."""
        return all(flat.gathered for flat in self.flats)

    def start_gather(self, *, async_op: bool) -> None:
        """Begin to fill its parameters, unless they are filled. Collective."""
        for flat in self.flats:
            flat.start_gather(async_op=async_op)

    def finish_gather(self) -> None:
        """Wait until its parameters can be used."""
        for flat in self.flats:
            flat.finish_gather()

    def free(self) -> None:
        """Release the memory of its parameters, unless one of its modules is running."""
        self.open.clear()
        if not self.running and not self.held:
            for flat in self.flats:
                flat.free()

    def check(self) -> None:
        """`RuntimeError` if a parameter was unfrozen since the model was sharded."""
        for flat in self.flats:
            if flat.gradient is None and any(p.requires_grad for p in flat.parameters):
                name = next(n for n, p in zip(flat.names, flat.parameters, strict=True) if p.requires_grad)
                raise RuntimeError(
                    f"{name!r} was frozen when its model was sharded. Call remove(), and shard the model again"
                )

    def written(self) -> RuntimeError | None:
        """Return an error if a gathered parameter was changed in place."""
        names = [name for flat in self.flats if (name := flat.written()) is not None]
        if not names:
            return None
        return RuntimeError(
            f"{names[0]!r} was changed in place while its sharded model ran, where each rank has a copy of it that is "
            "not kept. Change it inside `with sharded.full_parameters():`"
        )

    def is_seen_by(self, returned: Any) -> bool:
        """Return whether a tensor of what a module returned is a view of its parameters."""
        found = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        return any(flat.is_seen_by(leaf) for leaf in found for flat in self.flats)

    # -- gradients ------------------------------------------------------------------------------
    def begin_backward(self) -> None:
        """Expect a gradient of each trained parameter."""
        for _, gradient in self._trained:
            gradient.arrived.clear()

    def is_complete(self) -> bool:
        """Return whether each trained parameter has a gradient of the running pass that is not reduced."""
        return all(
            len(gradient.arrived) == sum(p.requires_grad for p in flat.parameters) for flat, gradient in self._trained
        )

    def has_taken(self) -> bool:
        """Return whether there are gradients that are not reduced."""
        return any(gradient.taken for _, gradient in self._trained)

    def presence(self) -> list[tuple[str, bool]]:
        """Return the name of each parameter that can be trained, and whether it has a gradient to be averaged."""
        return [
            (name, index in gradient.taken or index in gradient.reduced)
            for flat, gradient in self._trained
            for index, name in enumerate(flat.names)
        ]

    def start_reduce(self, *, async_op: bool) -> None:
        """Begin to average the gradients that were taken. Collective."""
        for _, gradient in self._trained:
            if gradient.taken:
                gradient.start_reduce(async_op=async_op)

    def finish_reduce(self) -> None:
        """Wait for the reduction that has begun."""
        for _, gradient in self._trained:
            gradient.finish_reduce()

    def commit(self) -> None:
        """Add what was averaged to the gradients of this rank's part."""
        for flat, gradient in self._trained:
            gradient.commit(flat.pieces)

    def drop(self) -> bool:
        """Forget gradients that are not committed. Return whether there were any that are not reduced."""
        had = self.has_taken()
        for _, gradient in self._trained:
            gradient.drop()
        return had


def make_units(
    plans: Sequence[UnitPlan],
    comms: ShardComms,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> list[Unit]:
    """Shard the parameters of each unit.

    No two messages have one length: the communicator's check then finds ranks that are at different units.
    """
    paddings = _Paddings(comms.size)
    units = []
    for plan in plans:
        kinds: dict[object, list[tuple[str, torch.Tensor]]] = {}
        for name, p in plan.parameters:
            kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append((name, p))
        flats = []
        for named in kinds.values():
            padding = paddings.of([p for _, p in named])
            flats.append(FlatParameters(named, comms, padding, param_dtype=param_dtype, reduce_dtype=reduce_dtype))
        units.append(Unit(plan, flats))
    return units


def recut_units(units: Sequence[Unit], comms: ShardComms) -> None:
    """Shard the parameters of each unit over the ranks that the communicator now has; their elements are undefined."""
    paddings = _Paddings(comms.size)
    for unit in units:
        for flat in unit.flats:
            flat.recut(paddings.of(flat.parameters))


class _Paddings:
    """Numbers of elements after the parameters of a flat tensor, with which no two messages have one length."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lengths: set[int] = set()

    def of(self, parameters: Sequence[torch.Tensor]) -> int:
        used = sum(p.numel() for p in parameters)
        length = max(1, -(-used // self._size))
        while length in self._lengths:
            length += 1
        self._lengths.add(length)
        return length * self._size - used


UnitPolicy = Iterable[type[nn.Module]] | Callable[[nn.Module], bool] | None

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_Path = tuple[nn.Module, ...]


@dataclass
class UnitPlan:
    """Parameters that are gathered together.

    Attributes:
        name: Name of the unit's module in the model; "" for the model.
        parameters: Its parameters, with their names in the model.
        modules: Modules that need these parameters.
    """

    name: str
    parameters: Named = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)


def partition(model: nn.Module, units: UnitPolicy = None) -> list[UnitPlan]:
    """Return the unit of the model itself, which may have no parameters, and the other units that have some.

    A parameter of several units, or a module, belongs to the nearest unit that encloses them all.

    Args:
        model: Any module.
        units: Classes of the modules that are units, or a predicate. None: the elements of each `ModuleList` and
            `Sequential`.

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


def _policy(units: UnitPolicy) -> Callable[[nn.Module], bool]:
    if isinstance(units, Iterable):
        classes = tuple(units)
        return lambda module: isinstance(module, classes)
    assert units is not None
    return units


def _elements(model: nn.Module) -> set[int]:
    """Find the elements of lists of modules, but not those inside another element."""
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
    """Return the units that both paths begin with."""
    length = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a is not b), min(len(one), len(two)))
    return one[:length]


def shardable(model: nn.Module) -> Named:
    """Return the parameters of a model that can be sharded; `TypeError` or `ValueError` if it cannot."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, not a {type(model).__name__}")
    named: Named = list(model.named_parameters())
    if not named:
        raise ValueError("the model has no parameters to shard")
    check_unclaimed(named)
    check_parameters(named)
    for name, parameter in named:
        if parameter.grad is not None:
            raise ValueError(f"{name!r} has a gradient. Call model.zero_grad(), then shard the model")
    return named
