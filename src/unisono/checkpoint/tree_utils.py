"""Looking into saved trees and into what they are put into."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.checkpoint.errors import StateError
from unisono.checkpoint.manifest import TensorEntry
from unisono.checkpoint.state import is_stateful, per_rank_of
from unisono.checkpoint.tree import DICTS, Node, named_tuple, names_in, tag_of, unpack
from unisono.core.tensor_shard import TensorShard
from unisono.core.tensors import is_non_overlapping
from unisono.serialization.tensors import has_no_storage

__all__ = [
    "elements_of",
    "empty_of",
    "entries_of",
    "has_objects",
    "has_tensors",
    "leaves",
    "misfit",
    "remapped_rank",
    "sequence_of",
    "tagged",
    "with_versions",
]

_log = logging.getLogger("unisono.checkpoint")


def leaves(node: Node, path: str = "") -> dict[str, str]:
    """Text for every value of a tree except tensors; values that share a path (keys may have dots) are joined."""
    if isinstance(node, dict) and "$tensor" not in node:
        inside = [(f"{path}.{key}" if path else key, item) for key, item in node.items()]
    elif isinstance(node, list):
        inside = [(f"{path}.{index}", item) for index, item in enumerate(node)]
    else:
        # A tensor's own name may be the path.
        return {f"{path} (which tensor)" if isinstance(node, dict) else path: json.dumps(node)}
    if not inside:
        return {path: json.dumps(node)}
    found: dict[str, str] = {}
    for key, item in inside:
        for name, text in leaves(item, key).items():
            found[name] = f"{found[name]}, {text}" if name in found else text
    return found


def remapped_rank(per_rank: Sequence[Sequence[Node]], rank: int, size: int) -> Callable[[int, str], Node | None]:
    """Return a lookup of the saved per-rank values that rank `rank` of `size` takes over, by their policy."""
    saved = len(per_rank)

    def source(index: int, policy: str) -> Node | None:
        if saved == size or (policy == "keep" and rank < saved):
            return per_rank[rank][index]
        if policy == "all":
            states = [trees[index] for trees in per_rank]
            if all(tag_of(state) == "$state" for state in states):
                return {"$state": ["list", [state["$state"][1] for state in states]]}
        if policy == "refuse":
            raise StateError(
                f"it has one state for each of the {saved} ranks that saved it, which {size} ranks cannot load"
            )
        if policy == "keep":
            _log.warning("saved by %d ranks: rank %d of %d keeps its random and compression state", saved, rank, size)
            return None
        return per_rank[rank % saved][index]

    return source


def has_tensors(value: Any) -> bool:
    """Return whether a value contains tensors or objects, and so has a shape that a checkpoint must fit."""
    return _any(value, lambda one: isinstance(one, torch.Tensor) or _is_object(one))


def has_objects(value: Any) -> bool:
    """Return whether a value contains objects, which cannot be replaced by created values."""
    return _any(value, _is_object)


def _is_object(value: Any) -> bool:
    return isinstance(value, TensorShard) or is_stateful(value) or per_rank_of(value) is not None


def _any(value: Any, holds: Callable[[Any], bool]) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(_any(item, holds) for item in (value.values() if isinstance(value, dict) else value))
    return holds(value)


def entries_of(node: Node) -> dict[Any, Node] | None:
    """A saved dict's values by key; None if the node is no dict, or has keys that are stored as tensors."""
    tag = tag_of(node)
    if tag in DICTS:
        if any(True for key, _ in node[tag] for _ in names_in(key)):
            return None
        return {unpack(key, _no_tensor): item for key, item in node[tag]}
    return node if isinstance(node, dict) and tag is None else None


def empty_of(node: Node) -> dict[Any, Any]:
    """An empty dict of the type that was saved."""
    return DICTS.get(tag_of(node) or "", dict)()


def elements_of(node: Node) -> list[Node] | None:
    """Values of a saved list or tuple; None if the node is neither."""
    tag = tag_of(node)
    body = node["$tuple"] if tag == "$tuple" else node["$named"][2] if tag == "$named" else node
    return body if isinstance(body, list) else None


def sequence_of(node: Node, items: list[Any]) -> list[Any] | tuple[Any, ...]:
    """Return the items in a sequence of the type that was saved."""
    if tag_of(node) == "$named":
        module, name, _ = node["$named"]
        return named_tuple(module, name, tuple(items))
    return tuple(items) if tag_of(node) == "$tuple" else items


def tagged(node: Node) -> list[tuple[str, Any]]:
    """Every generator and every per-rank value in a tree: its tag and its content."""
    tag = tag_of(node)
    if tag in ("$generator", "$rank"):
        return [(tag, node[tag])]
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [found for item in inner for found in tagged(item)]


def _no_tensor(name: str) -> torch.Tensor:
    raise ValueError("a tensor cannot be a key")


def misfit(target: torch.Tensor | TensorShard, entry: TensorEntry) -> str | None:
    """Return the reason that a tensor cannot hold the saved values; None if it can."""
    if tuple(target.shape) != entry.shape:
        return f"has shape {entry.shape} in it, {tuple(target.shape)} here"
    tensor = target.local if isinstance(target, TensorShard) else target
    saved = entry.dtype
    if tensor.is_meta:
        return None if tensor is target else "is a TensorShard on the meta device here, without memory to fill"
    if has_no_storage(tensor):
        return f"is a {type(tensor).__name__} here, without memory of its own to fill"
    if not _keeps(saved, tensor.dtype):
        return f"is {saved} in it, {tensor.dtype} here, which would change its values"
    return None if is_non_overlapping(tensor) else "has elements here that share memory, as after expand()"


def _keeps(saved: torch.dtype, here: torch.dtype) -> bool:
    """Return whether numbers keep their meaning: rounding is allowed; dropping a part or a large value is not."""
    if here == saved or here.is_complex:
        return True
    if here.is_floating_point:
        return not saved.is_complex
    if saved.is_floating_point or saved.is_complex or torch.bool in (saved, here):
        return saved == torch.bool
    small = torch.iinfo(saved)
    large = torch.iinfo(here)
    return large.min <= small.min and small.max <= large.max


def with_versions(state: dict[str, Any], saved: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """A module's state with the saved versions of its modules as metadata; version 1 where none was saved."""
    made = OrderedDict(state)
    versions = {name: saved.get(name, {"version": 1}) for name, _ in module.named_modules(remove_duplicate=False)}
    vars(made)["_metadata"] = OrderedDict({**versions, **saved})
    return made
