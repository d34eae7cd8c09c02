"""Order of an optimizer's parameters: saved states are assigned to parameters by name instead of number."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Any

import torch

from unisono.checkpoint.errors import listed
from unisono.checkpoint.manifest import TensorEntry
from unisono.checkpoint.tree import Node, elements_of, entries_of, memory_of_tensor, parameters_of, tag_of

__all__ = ["in_order_of"]

_WRAPPERS = ("module", "_orig_mod")
"""Components that DistributedDataParallel and torch.compile add to names."""

_Names = Sequence[str | None]


def in_order_of(
    optimizer: torch.optim.Optimizer,
    node: Node,
    beside: Sequence[str | list[int]] | None,
    known: Mapping[tuple[Any, ...], str],
    entries: Mapping[str, TensorEntry],
    path: str,
) -> tuple[Node, str | None]:
    """Return a saved state in the order of the optimizer's parameters, or the reason why it cannot be loaded.

    Parameters are matched by the names that the optimizer was created with, or by the names of tensors saved in the
    same checkpoint. Parameters without names are matched by order, with a warning if two of them could be swapped.

    Args:
        optimizer: The optimizer to load the state into.
        node: The saved state.
        beside: For each parameter, the name of its tensor in the checkpoint, else the optimizer's own name for it, else
            its shape. None if nothing is known.
        known: Maps the `memory_of_tensor` of each tensor in this process to the name of the saved tensor that it
            matches.
        entries: All saved tensors.
        path: The optimizer's location in the state.
    """
    items = entries_of(node) or {}
    groups = [entries_of(group) or {} for group in elements_of(items.get("param_groups")) or []]
    here = parameters_of(optimizer)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    found = [_size(group.get("params"), entries) for group in groups]
    misfit = f"has groups of {found} parameters in it, of {sizes} here"
    if not groups or len(found) != len(sizes) or sum(found) != len(here) or not _is_counted(groups):
        return node, misfit if groups and found != sizes else None
    saved: list[Any] = [*beside] if beside else [None] * len(here)
    names = [one if one in entries else None for one in map(_text, saved)]
    own_names = [name or _text(one) for name, one in zip(_own_names(groups, found), saved, strict=True)]
    tensors = [known.get(memory_of_tensor(p)) if p.data_ptr() else None for p, _, _ in here]
    own = [name for _, _, name in here]
    order = _matched(names, own_names, tensors, own)
    if order is None:
        odd = sorted({str(name) for name in (*names, *tensors)} - ({*names} & {*tensors}) - {"None"})
        return node, f"has other parameters in it than here: {listed(odd or sorted(map(str, own)))}"
    rest = iter(sorted({*range(len(here))}.difference(order)))
    unnamed = [number for number, place in enumerate(order) if place is None]
    places = [next(rest) if place is None else place for place in order]
    shapes = [entries[one].shape if _text(one) in entries else isinstance(one, list) and tuple(one) for one in saved]
    for number in unnamed:
        shape = shapes[places[number]]
        if shape not in (False, tuple(here[number][1])):
            return node, f"has shape {shape} of parameter {number} in it, {tuple(here[number][1])} here"
    if entries_of(items.get("state")):
        _warn_of_equal_shapes(unnamed, here, path)
    if places == list(range(len(here))) and found == sizes:
        return node, None
    if isinstance(optimizer, torch.optim.LBFGS):
        return node, "has its parameters in another order in it, which LBFGS cannot change"
    made = _reordered(optimizer, items, groups, found, places)
    return made or node, None if made else misfit if found != sizes else "has other parameters in a group here"


def _text(one: Any) -> str | None:
    return one if isinstance(one, str) else None


def _size(node: Node, entries: Mapping[str, TensorEntry]) -> int:
    return entries[node["$numbers"]].shape[0] if tag_of(node) == "$numbers" and node else len(elements_of(node) or ())


def _is_counted(groups: Sequence[Mapping[str, Node]]) -> bool:
    """Return whether parameters are numbered in order, as in torch. Ignores long lists: they are not in memory yet."""
    numbers = [number for group in groups for number in elements_of(group.get("params")) or ()]
    return all(type(number) is int for number in numbers) and all(b > a for a, b in pairwise(numbers))


def _own_names(groups: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[str | None]:
    return [
        name for group, size in zip(groups, sizes, strict=True) for name in group.get("param_names") or [None] * size
    ]


def _matched(names: _Names, own_names: _Names, tensors: _Names, own: _Names) -> list[int | None] | None:
    """Return the saved number of each parameter (None for a parameter without a name); None if no names match.

    Args:
        names: Saved names of parameters whose tensors are in the same checkpoint.
        own_names: The saved optimizer's own names for the parameters, if it has names.
        tensors, own: Counterparts of `names` and `own_names` for this process's parameters.
    """
    at = {name: number for number, name in enumerate(names) if name}
    order = [at.get(name) if name else None for name in tensors]
    places = {place for place in order if place is not None}
    if len(places) == len(order) or (all(names) and all(tensors)):
        return order if len(places) == len(order) else None
    for here in (own, tensors):
        pair = _bare(own_names), _bare(here)
        if pair[0] and pair[1] and len({*pair[0]}) == len(here) and {*pair[0]} == {*pair[1]}:
            place = {name: number for number, name in enumerate(pair[0])}
            return [place[name] for name in pair[1]]
    is_odd = any(names) and len(places) < sum(map(bool, tensors))
    return None if is_odd or (not places and all(own) and all(own_names)) else order


def _bare(names: _Names) -> list[str] | None:
    """Return names without wrapper components and without their common prefix; None if a name is unknown."""
    if not all(names):
        return None
    parts = [[part for part in str(name).split(".") if part not in _WRAPPERS] for name in names]
    columns = zip(*(one[:-1] for one in parts), strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len({*column}) == 1, columns))
    return [".".join(one[shared:]) for one in parts]


def _warn_of_equal_shapes(
    unnamed: Sequence[int], here: Sequence[tuple[torch.Tensor, torch.Size, str | None]], path: str
) -> None:
    seen: dict[torch.Size, int] = {}
    for number in unnamed:
        shape = here[number][1]
        if shape in seen:
            warnings.warn(
                f"the parameters of {path!r} have no names, so its state goes by their order: {seen[shape]} and "
                f"{number}, both of shape {tuple(shape)}, could be swapped. Create the optimizer from "
                "model.named_parameters(), or save and load its model in the same state",
                stacklevel=2,
            )
            return
        seen[shape] = number


def _reordered(
    optimizer: torch.optim.Optimizer,
    items: Mapping[Any, Node],
    groups: Sequence[Mapping[Any, Node]],
    found: Sequence[int],
    places: Sequence[int],
) -> Node | None:
    """Return the state in this process's parameter order; None if a group mixes parameters of several saved groups."""
    ends = list(accumulate(found))
    made: list[Node] = []
    number = 0
    for group in optimizer.param_groups:
        mine = range(number, number + len(group["params"]))
        number = mine.stop
        of = {next(g for g, end in enumerate(ends) if places[n] < end) for n in mine} or {len(made)}
        if len(of) > 1 or found[min(of)] != len(mine):
            return None
        names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
        made.append({**groups[min(of)], **names, "params": list(mine)})
    numbers = {place: number for number, place in enumerate(places)}
    states = [[numbers.get(key, key), node] for key, node in (entries_of(items["state"]) or {}).items()]
    return {**items, "state": {"$dict": states}, "param_groups": made}
