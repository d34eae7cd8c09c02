"""Restoring a state: match it against the saved tree, place its tensors, then load its objects.

Nothing is changed before everything fits: matching returns what there is to do, as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from unisono.checkpoint.errors import FormatError, StateError, listed
from unisono.checkpoint.manifest import TensorEntry
from unisono.checkpoint.state import PerRank, is_stateful, per_rank_of
from unisono.checkpoint.tensor_shard import TensorShard
from unisono.checkpoint.tree import Node, join, names_in, tag_of, unpack
from unisono.checkpoint.tree_utils import (
    elements_of,
    empty_of,
    entries_of,
    groups_misfit,
    has_objects,
    has_tensors,
    misfit,
    tagged,
    with_versions,
)

__all__ = ["Restorer"]

_Mode = Literal["top", "strict", "shapes", "loose"]
"""Required match: all names of the target; exactly these names; shapes of tensors that both have; none."""

_Build = Callable[[], Any]

# Errors that a hostile tree may cause when values are built from it.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError)


class Restorer:
    """Matcher of a target with a saved tree.

    Args:
        entries: All saved tensors; also an attribute.
        source: Returns this rank's tree of a per-rank value (see `remapped_rank`); None if it keeps its value.
        strict: Whether names that only one side has are an error.

    Attributes:
        targets: Tensors of the target to read saved ones of the same dtype and shape into.
        needed: Names of all tensors to read.
        shards: Shards of the target, with the names of the tensors to read their ranges of.
        values: The tensors, by name; fill it in before `build`.
    """

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        source: Callable[[int, str], Node | None],
        *,
        strict: bool = True,
    ) -> None:
        self.targets: dict[str, torch.Tensor] = {}
        self.needed: dict[str, None] = {}
        self.shards: list[tuple[str, TensorShard]] = []
        self.values: dict[str, torch.Tensor] = {}
        self.entries, self._source, self._strict = entries, source, strict
        self._problems: list[str] = []
        self._missing: list[str] = []
        self._unexpected: list[str] = []

    def needed_entries(self) -> list[tuple[str, TensorEntry]]:
        """The needed tensors."""
        return [(name, self.entries[name]) for name in self.needed]

    def match(self, target: Any, node: Node) -> _Build:
        """Return a function that puts the values of `node` into `target` and returns it.

        Raises:
            StateError: The values do not fit; names are listed.
        """
        try:
            build = self._match(target, node, "", "top")
        except StateError:
            raise
        except _UNREADABLE as error:
            raise FormatError(f"its state is not one that unisono writes ({error})") from error
        problems = list(self._problems)
        if self._missing:
            problems.insert(0, f"it lacks {listed(self._missing)}, which the state has")
        if self._unexpected:
            problems.insert(0, f"it has {listed(self._unexpected)}, which the state lacks")
        if problems:
            raise StateError(
                f"it is of another model: {'; '.join(problems[:6])}",
                tensors=[*self._unexpected, *self._missing],
            )
        return build

    # -- matching ------------------------------------------------------------------------------
    def _match(self, target: Any, node: Node, path: str, mode: _Mode, *, fresh: bool = False) -> _Build:
        """`fresh`: new containers are created, because the target's belong to an object."""
        own = per_rank_of(target)
        if own is not None:
            return self._match_own(own, target, node, path)
        if tag_of(node) == "$rank":
            mine = self._source(*node["$rank"])
            return self._match(target, mine, path, mode, fresh=fresh) if mine is not None else lambda: target
        if is_stateful(target):
            return self._match_object(target, node, path)
        if isinstance(target, TensorShard):
            return self._match_shard(target, node, path)
        if tag_of(node) == "$state":
            node = node["$state"][1]
        if isinstance(target, torch.Tensor) and tag_of(node) == "$tensor":
            return self._match_tensor(target, node["$tensor"], path, mode)
        return self._match_container(target, node, path, mode, fresh)

    def _match_container(self, target: Any, node: Node, path: str, mode: _Mode, fresh: bool) -> _Build:
        items, elements = entries_of(node), elements_of(node)
        firm = mode in ("top", "strict") and not (isinstance(node, dict) and tag_of(node) == "$numbers")
        if isinstance(target, dict) and items is not None:
            return self._match_dict(target, items, path, mode, empty_of(node) if fresh else None)
        if isinstance(target, (list, tuple)) and elements is not None and len(elements) == len(target):
            return self._match_list(target, elements, path, mode, fresh)
        if firm and isinstance(target, (list, tuple)) and elements is not None and has_objects(target):
            self._problems.append(f"{path!r} has {len(elements)} entries in it, {len(target)} here")
        elif firm and has_tensors(target) and (isinstance(target, (dict, torch.Tensor)) or has_objects(target)):
            self._problems.append(f"{path!r} is a {type(target).__name__} here, but not in it")
        build = self._create(node)
        if not isinstance(target, list) or fresh or elements is None:
            return build

        def put() -> Any:
            target[:] = build()
            return target

        return put

    def _match_own(self, own: PerRank, target: Any, node: Node, path: str) -> _Build:
        if tag_of(node) == "$rank":
            node = self._source(*node["$rank"])
        if node is None:
            return lambda: target
        if isinstance(own.obj, torch.Generator):
            return self._match_generator(own.obj, node, target)
        build = (
            self._match_object(own.obj, node, path)
            if is_stateful(own.obj)
            else self._match(own.obj, node, path, "loose")
        )

        def put() -> Any:
            own.obj = build()
            return target

        return put

    def _match_generator(self, generator: torch.Generator, node: Node, target: Any) -> _Build:
        name = str(node["$generator"])
        self.needed[name] = None

        def put() -> Any:
            generator.set_state(self.values[name].cpu())
            return target

        return put

    def _match_object(self, target: Any, node: Node, path: str) -> _Build:
        _, inner, *metadata = node["$state"] if tag_of(node) == "$state" else ("", node)
        current = target.state_dict()
        module = isinstance(target, torch.nn.Module)
        if isinstance(target, torch.optim.Optimizer) and (why := groups_misfit(current, inner, self.entries)):
            self._problems.append(f"{path!r} {why}")
        mode: _Mode = "strict" if module else "shapes" if isinstance(target, torch.optim.Optimizer) else "loose"
        build = self._match(current, inner, path, mode, fresh=True)
        versions = self._create(metadata[0]) if module and metadata else None
        # Parameters on the meta device have no memory to fill: the loaded ones take their place.
        assign = module and any(isinstance(t, torch.Tensor) and t.is_meta for t in current.values())
        options = {"strict": self._strict, "assign": assign} if module else {}

        def put() -> Any:
            made = build()
            if versions is not None:
                made = with_versions(made, versions(), target)
            target.load_state_dict(made, **options)
            return target

        return put

    def _match_tensor(self, target: torch.Tensor, name: str, path: str, mode: _Mode) -> _Build:
        self.needed[name] = None
        entry = self.entries[name]
        if is_lazy(target):
            return lambda: self.values[name]
        why = misfit(target, entry)
        if why and mode != "loose":
            self._problems.append(f"{path!r} {why}")
        if why or target.is_meta:
            return lambda: self.values[name]
        if target.dtype == entry.dtype:
            self.targets.setdefault(name, target)

        def put() -> torch.Tensor:
            if self.values[name] is not target:
                target.copy_(self.values[name])
            return target

        return put

    def _match_shard(self, shard: TensorShard, node: Node, path: str) -> _Build:
        name = str(node["$tensor"]) if tag_of(node) == "$tensor" else None
        why = misfit(shard, self.entries[name]) if name else "is a TensorShard here, but no tensor in it"
        if why:
            self._problems.append(f"{path!r} {why}")
        self.shards.append((name or "", shard))
        return lambda: shard

    def _match_dict(
        self, target: dict[Any, Any], items: dict[Any, Node], path: str, mode: _Mode, made: dict[Any, Any] | None
    ) -> _Build:
        """`made`: what to fill in place of the target, if anything."""
        fresh = made is not None
        if mode == "strict" and not fresh and not has_tensors(target):
            mode = "loose"
        if mode in ("top", "strict") and self._strict:
            self._missing += [join(path, key) for key in target if key not in items]
        if mode == "strict" and self._strict:
            self._unexpected += [join(path, key) for key in items if key not in target]
        below: _Mode = "strict" if mode == "top" else mode
        builds = {
            key: self._create(item)
            if _is_extra(key)
            else self._match(target.get(key), item, join(path, key), below, fresh=fresh)
            for key, item in items.items()
            if key in target or mode != "top"
        }

        def put() -> Any:
            found = {key: build() for key, build in builds.items()}
            into = target if made is None else made
            if mode == "loose":
                into.clear()
            for key, item in found.items():
                # A Counter's `update` would add.
                into[key] = item
            return into

        return put

    def _match_list(
        self, target: list[Any] | tuple[Any, ...], elements: list[Node], path: str, mode: _Mode, fresh: bool
    ) -> _Build:
        below: _Mode = "strict" if mode == "top" else mode
        builds = [
            self._match(there, node, join(path, i), below, fresh=fresh)
            for i, (there, node) in enumerate(zip(target, elements, strict=True))
        ]

        def put() -> Any:
            made = [build() for build in builds]
            if isinstance(target, tuple):
                return target._make(made) if hasattr(target, "_make") else tuple(made)
            if fresh:
                return made
            target[:] = made
            return target

        return put

    # -- values that are created ---------------------------------------------------------------
    def _create(self, node: Node) -> _Build:
        self.needed.update(dict.fromkeys(self._names(node)))

        def put() -> Any:
            try:
                return unpack(node, self.values.__getitem__, self._special)
            except _UNREADABLE as error:
                raise FormatError(f"its state is not one that unisono writes ({error})") from error

        return put

    def _names(self, node: Node) -> list[str]:
        found = list(names_in(node))
        for tag, body in tagged(node):
            if tag == "$generator":
                found.append(str(body))
            elif tag == "$rank":
                mine = self._source(*body)
                found += self._names(mine) if mine is not None else []
        return found

    def _special(self, tag: str, body: Any) -> Any:
        if tag == "$state":
            return unpack(body[1], self.values.__getitem__, self._special)
        if tag == "$generator":
            return self.values[str(body)]
        if tag == "$rank":
            mine = self._source(*body)
            return None if mine is None else unpack(mine, self.values.__getitem__, self._special)
        raise ValueError(f"there is a value of the unknown kind {tag!r}")


def _is_extra(key: Any) -> bool:
    """Return whether an entry is what a module adds by `get_extra_state`: it may have any form, as torch loads it."""
    return isinstance(key, str) and key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX
