"""Restores a state: matches it with the saved tree, places its tensors, and loads its objects.

Nothing is changed until everything is known to fit: matching only returns functions that do the work later. Objects
that may reject their state are loaded first, from tensors read into separate memory; tensors are overwritten in place
only afterwards.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from unisono.checkpoint.collective import CollectiveScope
from unisono.checkpoint.errors import CheckpointError, FormatError, StateError, listed
from unisono.checkpoint.manifest import TensorEntry
from unisono.checkpoint.optimizer_order import in_order_of
from unisono.checkpoint.tree import (
    DICTS,
    Node,
    PerRank,
    elements_of,
    entries_of,
    is_stateful,
    join,
    memory_of_tensor,
    names_in,
    per_rank_of,
    sequence_of,
    tag_of,
    tagged,
    unpack,
)
from unisono.core.load_hook import LoadHook, announce_load
from unisono.core.tensor_shard import TensorShard
from unisono.core.tensors import is_non_overlapping
from unisono.serialization.tensors import has_no_storage

__all__ = ["Restorer", "Wanted", "remapped_rank"]

_log = logging.getLogger("unisono.checkpoint")

_Mode = Literal["top", "strict", "shapes", "loose"]
"""What must match: all names of the target; exactly the same names; shapes of tensors in both; nothing."""

_Build = Callable[[], Any]

# Errors that may occur while values are built from a maliciously crafted tree.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError)

_ASIDE = 64 << 20
"""Size limit of a state that is read into separate memory while a copy of the object's old state is kept."""

_JUST_LOADS = (torch.nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


@dataclass
class Wanted:
    """Tensors to read.

    Attributes:
        needed: Names of the tensors.
        targets: Existing tensors with a matching dtype and shape, by name, which are filled in place.
        shards: Shards to fill, each with the name of the full tensor.
    """

    needed: dict[str, None] = field(default_factory=dict)
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: list[tuple[str, TensorShard]] = field(default_factory=list)


@dataclass(eq=False)
class _EarlyObject:
    """An object in the target that may reject its state.

    Attributes:
        path: The object's location in the state, for messages.
        load: Function that loads the saved state into the object; raises `StateError`.
        state: The object's old state; None if it is too large to copy.
        undo: Function that loads a given state into the object.
    """

    path: str
    load: _Build
    state: Any
    undo: Callable[[Any], Any]

    def copied(self) -> Any:
        """Return a copy of the old state; None if it is too large, or cannot be copied."""
        # An object whose state cannot be copied is not restored after a failed load; if it had already been loaded, a
        # note on the error names it.
        with suppress(Exception):
            return copy.deepcopy(self.state)

    def put_back(self, before: Any) -> bool:
        """Load the copy of the old state, and return whether this succeeded."""
        if before is None:
            return False
        # If the object rejects even its old state, the caller reports that the object may have changed.
        with suppress(Exception):
            self.undo(before)
            return True
        return False


class Restorer:
    """Matches a target state with a saved tree.

    Args:
        entries: Metadata of all saved tensors (also available as an attribute).
        source: Function that returns this rank's tree for a per-rank value (see `remapped_rank`), or None to keep the
            current value.
        strict: Whether a name that exists only in the target or only in the checkpoint is an error.

    Attributes:
        parts: Objects that `load_early` loads.
        early: Tensors of these objects.
        late: All other tensors.
        values: Tensors read from the checkpoint, by name. The caller adds the tensors of `early` before it calls
            `load_early`, and the tensors of `late` before it calls the function that `match` returned.
    """

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        source: Callable[[int, str], Node | None],
        *,
        strict: bool = True,
    ) -> None:
        self.early: Wanted = Wanted()
        self.late: Wanted = Wanted()
        self.values: dict[str, torch.Tensor] = {}
        self.entries = entries
        self._source = source
        self._strict = strict
        self._problems: list[str] = []
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        # Where to add the next tensors: to `early` while an object that is loaded early is being matched, and to `late`
        # otherwise.
        self._wanted = self.late
        self.parts: list[_EarlyObject] = []
        # Names of saved tensors, keyed by the memory of the target's tensors; used to match optimizers once all names
        # are known.
        self._names_here: dict[tuple[Any, ...], str] = {}
        self._optimizers: list[Callable[[], None]] = []

    def load_early(self, scope: CollectiveScope) -> None:
        """Load the objects that may reject their state, either all of them on all ranks or none. Collective.

        Raises:
            StateError: An object rejected its state; the error names it. Objects that were already loaded are restored;
                a note on the error lists any that could not be restored.
        """
        begun: list[tuple[_EarlyObject, Any]] = []
        loaded: list[_EarlyObject] = []

        def load() -> None:
            for part in self.parts:
                begun.append((part, part.copied()))
                part.load()
                loaded.append(part)

        try:
            scope.all_or_none(load)
        except CheckpointError as error:
            changed = [part.path for part, before in reversed(begun) if not part.put_back(before) and part in loaded]
            error.add_note(f"{listed(changed)} may have changed" if changed else "nothing else was changed")
            raise

    def match(self, target: Any, node: Node) -> _Build:
        """Return a function that restores `target` from `node`, in place if possible, and returns the restored state.

        Raises:
            StateError: The values do not fit; the error lists the names.
        """
        try:
            build = self._match(target, node, "", "top")
            for match in self._optimizers:
                match()
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
        """Match a value. `fresh`: Whether to create new containers, because those in the target belong to an object."""
        tag = tag_of(node)
        if tag == "$tensor" and isinstance(target, torch.Tensor):
            return self._match_tensor(target, node[tag], path, mode)
        own = per_rank_of(target)
        if own is not None:
            return self._match_own(own, target, node, path)
        if tag == "$rank":
            mine = self._source(*node[tag])
            return self._match(target, mine, path, mode, fresh=fresh) if mine is not None else lambda: target
        if is_stateful(target):
            return self._match_object(target, node, path)
        if isinstance(target, TensorShard):
            return self._match_shard(target, node, path)
        if tag == "$state":
            return self._match(target, node[tag][1], path, mode, fresh=fresh)
        return self._match_container(target, node, path, mode, fresh)

    def _match_container(self, target: Any, node: Node, path: str, mode: _Mode, fresh: bool) -> _Build:
        if isinstance(target, Enum) and tag_of(node) == "$enum" and node["$enum"][2] in type(target).__members__:
            return lambda: type(target)[node["$enum"][2]]
        items = entries_of(node)
        elements = elements_of(node)
        firm = mode in ("top", "strict") and not (isinstance(node, dict) and tag_of(node) == "$numbers")
        if isinstance(target, dict) and items is not None:
            like = DICTS.get(tag_of(node) or "", dict)()
            if isinstance(target, defaultdict) and tag_of(node) not in DICTS:
                like = defaultdict(target.default_factory)
            return self._match_dict(target, items, path, mode, like if fresh else None)
        if isinstance(target, (list, tuple)) and elements is not None and len(elements) == len(target):
            return self._match_list(target, node, elements, path, mode, fresh)
        if firm and isinstance(target, (list, tuple)) and elements is not None and _has_objects(target):
            self._problems.append(f"{path!r} has {len(elements)} entries in it, {len(target)} here")
        elif firm and _has_tensors(target) and (isinstance(target, (dict, torch.Tensor)) or _has_objects(target)):
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
        self._wanted.needed[name] = None

        def put() -> Any:
            generator.set_state(self.values[name].cpu())
            return target

        return put

    def _match_object(self, target: Any, node: Node, path: str) -> _Build:
        _, inner, *rest = node["$state"] if tag_of(node) == "$state" else ("", node)
        current = target.state_dict()
        if isinstance(target, torch.nn.Module):
            return self._match_module(target, current, inner, self._create(rest[0]) if rest else None, path)
        if not isinstance(target, torch.optim.Optimizer):
            return self._match_part(target, current, inner, path, "loose")
        build: list[_Build] = []

        def match() -> None:
            saved = rest[0] if rest else None
            ordered, why = in_order_of(target, inner, saved, self._names_here, self.entries, path)
            if why:
                self._problems.append(f"{path!r} {why}")
            build.append(self._match_part(target, current, ordered, path, "shapes"))

        def put() -> Any:
            return build[0]()

        self._optimizers.append(match)
        return put

    def _match_module(
        self, target: torch.nn.Module, current: dict[str, Any], inner: Node, versions: _Build | None, path: str
    ) -> _Build:
        # Parameters on the meta device have no memory to fill, so the loaded tensors replace them.
        tensors = [t for t in current.values() if isinstance(t, torch.Tensor)]
        assign = any(t.is_meta for t in tensors)
        ties = _ties(target) if assign else []

        def load(state: Any) -> None:
            made = state if versions is None else _with_versions(state, versions(), target)
            target.load_state_dict(made, strict=self._strict, assign=assign)
            for owner, leaf, tied in ties:
                setattr(owner, leaf, target.get_parameter(tied))

        known = len(self._missing), len(self._problems), len(self._unexpected)
        if not _adapts(target):
            build = self._match(current, inner, path, "strict", fresh=True)
            lacking = len(self._missing) > known[0] and (len(self._problems), len(self._unexpected)) == known[1:]
            if not (lacking and any(isinstance(m, _NormBase) for m in target.modules())):
                # Skip `load_state_dict` for tensors that are read in place: it would copy them onto themselves, and
                # takes O(n^2) time for n modules in a list.
                in_place = self._wanted is self.late and not assign and not any(map(is_lazy, tensors))
                return self._loading((lambda state: announce_load(target)) if in_place else load, build, path, target)
            del self._missing[known[0] :]
        items = entries_of(inner) or {}
        for name, tensor in current.items():
            if isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and tag_of(items.get(name)) == "$tensor":
                self._names_here.setdefault(memory_of_tensor(tensor), str(items[name]["$tensor"]))
        before = self._wanted
        self._wanted = self.early
        build = self._create(inner)
        self._wanted = before
        put = self._loading(load, build, path, target)
        old = current if self._nbytes(inner) <= _ASIDE else None
        undo = partial(target.load_state_dict, strict=False, assign=assign)
        self.parts.append(_EarlyObject(path, put, old, undo))
        return lambda: target

    def _match_part(self, target: Any, current: Any, inner: Node, path: str, mode: _Mode) -> _Build:
        """Match an object that is not a module; load it early if small, unless it is a plain torch optimizer."""
        plain = getattr(type(target), "load_state_dict", None) is torch.optim.Optimizer.load_state_dict
        early = (
            not plain and self._nbytes(inner) <= _ASIDE and not _any(current, lambda one: isinstance(one, TensorShard))
        )
        before = self._wanted
        self._wanted = self.early if early else before
        build = self._match(current, inner, path, mode, fresh=True)
        self._wanted = before
        put = self._loading(target.load_state_dict, build, path, target)
        if not early:
            return put
        self.parts.append(_EarlyObject(path, put, current, target.load_state_dict))
        return lambda: target

    def _loading(self, load: Callable[[Any], Any], build: _Build, path: str, target: Any) -> _Build:
        def put() -> Any:
            made = build()
            try:
                load(made)
            except Exception as error:
                # An object may raise any error to reject its state.
                where = repr(path) if path else "the object"
                raise StateError(f"{where} refuses its state ({type(error).__name__}: {error})") from error
            return target

        return put

    def _nbytes(self, node: Node) -> int:
        return sum(self.entries[name].nbytes for name in self._names(node) if name in self.entries)

    def _match_tensor(self, target: torch.Tensor, name: str, path: str, mode: _Mode) -> _Build:
        self._wanted.needed[name] = None
        entry = self.entries[name]
        if is_lazy(target):
            return lambda: self.values[name]
        why = _misfit(target, entry)
        if why and mode != "loose":
            self._problems.append(f"{path!r} {why}")
        if why or target.is_meta:
            return lambda: self.values[name]
        self._names_here.setdefault(memory_of_tensor(target), name)
        if self._wanted is self.early:
            return lambda: self.values[name].to(target)
        if target.dtype == entry.dtype:
            self.late.targets.setdefault(name, target)

        def put() -> torch.Tensor:
            if self.values[name] is not target:
                target.copy_(self.values[name])
            return target

        return put

    def _match_shard(self, shard: TensorShard, node: Node, path: str) -> _Build:
        name = str(node["$tensor"]) if tag_of(node) == "$tensor" else None
        why = _misfit(shard, self.entries[name]) if name else "is a TensorShard here, but no tensor in it"
        if why:
            self._problems.append(f"{path!r} {why}")
        self.late.shards.append((name or "", shard))
        return lambda: shard

    def _match_dict(
        self, target: dict[Any, Any], items: dict[Any, Node], path: str, mode: _Mode, made: dict[Any, Any] | None
    ) -> _Build:
        """Match a dict, to be written to `made`, or to the target if `made` is None."""
        fresh = made is not None
        if mode == "strict" and not fresh and not _has_tensors(target):
            mode = "loose"
        if mode in ("top", "strict") and self._strict:
            self._missing += [join(path, key) for key in target if key not in items]
        if mode == "strict" and self._strict:
            self._unexpected += [join(path, key) for key in items if key not in target]
        below: _Mode = "strict" if mode == "top" else mode
        builds = {
            key: self._match(target.get(key), item, join(path, key), below, fresh=fresh)
            for key, item in items.items()
            if key in target or mode != "top"
        }

        def put() -> Any:
            found = {key: build() for key, build in builds.items()}
            into = target if made is None else made
            if mode == "loose":
                into.clear()
            for key, item in found.items():
                # A Counter's `update` would add to the counts instead of replacing them.
                into[key] = item
            return into

        return put

    def _match_list(
        self,
        target: list[Any] | tuple[Any, ...],
        node: Node,
        elements: list[Node],
        path: str,
        mode: _Mode,
        fresh: bool,
    ) -> _Build:
        below: _Mode = "strict" if mode == "top" else mode
        builds = [
            self._match(there, element, join(path, i), below, fresh=fresh)
            for i, (there, element) in enumerate(zip(target, elements, strict=True))
        ]

        def put() -> Any:
            made = [build() for build in builds]
            saved = sequence_of(node, made)
            unknown = tag_of(node) == "$named" and type(saved) is tuple
            if isinstance(target, tuple) and hasattr(target, "_make") and (unknown or not fresh):
                return target._make(made)
            if fresh:
                return saved
            if isinstance(target, tuple):
                return tuple(made)
            target[:] = made
            return target

        return put

    # -- creating values -----------------------------------------------------------------------
    def _create(self, node: Node) -> _Build:
        self._wanted.needed.update(dict.fromkeys(self._names(node)))

        def put() -> Any:
            try:
                return unpack(node, self.values.__getitem__, self._source)
            except _UNREADABLE as error:
                raise FormatError(f"its state is not one that unisono writes ({error})") from error

        return put

    def _names(self, node: Node) -> Iterator[str]:
        yield from names_in(node)
        for tag, body in tagged(node):
            if tag == "$rank":
                yield from self._names(self._source(*body))


def _adapts(module: torch.nn.Module) -> bool:
    """Return whether the module or any submodule has custom loading logic, so that torch must load the state."""
    return type(module).load_state_dict is not torch.nn.Module.load_state_dict or any(
        one._load_state_dict_pre_hooks
        or not all(isinstance(hook, LoadHook) for hook in one._load_state_dict_post_hooks.values())
        or getattr(one._load_from_state_dict, "__func__", None) not in _JUST_LOADS
        or type(one).set_extra_state is not torch.nn.Module.set_extra_state
        for one in module.modules()
    )


def _ties(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, str]]:
    """Return each alias of a tied parameter: the module, the alias in the module, and the parameter's first name."""
    names: dict[int, str] = {}
    found = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            owner, _, leaf = name.rpartition(".")
            found.append((module.get_submodule(owner), leaf, first))
    return found


def remapped_rank(per_rank: Sequence[Sequence[Node]], rank: int, size: int) -> Callable[[int, str], Node | None]:
    """Return a function that maps a per-rank value's number and policy to the saved tree that rank `rank` loads."""
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


def _has_tensors(value: Any) -> bool:
    """Return whether a value contains tensors or objects, and so has a structure that a checkpoint must match."""
    return _any(value, lambda one: isinstance(one, torch.Tensor) or _is_object(one))


def _has_objects(value: Any) -> bool:
    """Return whether a value contains objects, which can only be loaded in place, not created from a tree."""
    return _any(value, _is_object)


def _is_object(value: Any) -> bool:
    return isinstance(value, TensorShard) or is_stateful(value) or per_rank_of(value) is not None


def _any(value: Any, holds: Callable[[Any], bool]) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(_any(item, holds) for item in (value.values() if isinstance(value, dict) else value))
    return holds(value)


def _misfit(target: torch.Tensor | TensorShard, entry: TensorEntry) -> str | None:
    """Return the reason why a tensor cannot hold the saved values; None if it can."""
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
    """Return whether a conversion preserves values: it may round, but not drop an imaginary part or wrap integers."""
    if here == saved or here.is_complex:
        return True
    if here.is_floating_point:
        return not saved.is_complex
    if saved.is_floating_point or saved.is_complex or torch.bool in (saved, here):
        return saved == torch.bool
    small = torch.iinfo(saved)
    large = torch.iinfo(here)
    return large.min <= small.min and small.max <= large.max


def _with_versions(state: dict[str, Any], saved: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's state, with its submodules' saved versions as metadata (version 1 if none was saved)."""
    made = OrderedDict(state)
    versions = {name: saved.get(name, {"version": 1}) for name, _ in module.named_modules(remove_duplicate=False)}
    vars(made)["_metadata"] = OrderedDict({**versions, **saved})
    return made
