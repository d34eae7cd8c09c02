"""Looking into saved trees and into what they are put into."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.checkpoint.errors import StateError
from unisono.checkpoint.state import is_stateful, per_rank_of
from unisono.checkpoint.tree import Node, tag_of, unpack

__all__ = ["elements_of", "entries_of", "has_tensors", "join", "tagged", "taken_over"]

_log = logging.getLogger("unisono.checkpoint")


def taken_over(per_rank: Sequence[Sequence[Node]], rank: int, size: int) -> Callable[[int, str], Node | None]:
    """What rank `rank` of `size` takes over of values that each saving rank had for itself, by their policy."""
    saved = len(per_rank)

    def source(index: int, policy: str) -> Node | None:
        if saved == size or (policy == "keep" and rank < saved):
            return per_rank[rank][index]
        if policy == "all":
            states = [trees[index] for trees in per_rank]
            if all(tag_of(state) == "$state" for state in states):
                return {"$state": ["list", [state["$state"][1] for state in states]]}
        if policy == "refuse":
            raise StateError(f"it has state of each of the {saved} ranks that saved it, which {size} cannot take over")
        if policy == "keep":
            _log.warning("saved by %d ranks: rank %d of %d keeps its random and compression state", saved, rank, size)
            return None
        return per_rank[rank % saved][index]

    return source


def has_tensors(value: Any) -> bool:
    """Whether there are tensors or objects in it, so that it has a shape that a checkpoint must fit."""
    if isinstance(value, dict):
        return any(map(has_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_tensors, value))
    return isinstance(value, torch.Tensor) or is_stateful(value) or per_rank_of(value) is not None


def join(path: str, key: object) -> str:
    """The path of what a container holds under a key."""
    return f"{path}.{key}" if path else str(key)


def entries_of(node: Node) -> dict[Any, Node] | None:
    """A saved dict's values by key, or None if it is none."""
    tag = tag_of(node)
    if tag in ("$dict", "$ordered", "$counter"):
        return {unpack(key, _no_tensor): item for key, item in node[tag]}
    return node if isinstance(node, dict) and tag is None else None


def elements_of(node: Node) -> list[Node] | None:
    """A saved list's or tuple's values, or None if it is none."""
    body = node["$tuple"] if tag_of(node) == "$tuple" else node
    return body if isinstance(body, list) else None


def tagged(node: Node) -> list[tuple[str, Any]]:
    """Every generator and every value of one rank in a tree: its tag, and what stands under it."""
    tag = tag_of(node)
    if tag in ("$generator", "$rank"):
        return [(tag, node[tag])]
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [found for item in inner for found in tagged(item)]


def _no_tensor(name: str) -> torch.Tensor:
    raise ValueError("a tensor is no key")
