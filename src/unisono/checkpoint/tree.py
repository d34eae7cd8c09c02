"""Splits a state into JSON and named tensors, and reassembles the state. Loading the JSON never runs code.

A dict with a single key that begins with `$` represents a value of a type that JSON lacks.
"""

from __future__ import annotations

import base64
import json
import math
import random
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from unisono.checkpoint.errors import FormatError
from unisono.core.tensor_shard import TensorShard
from unisono.core.tensors import view_of
from unisono.serialization.classes import class_of
from unisono.serialization.tensors import has_no_storage

__all__ = [
    "DICTS",
    "DTYPE_NAMES",
    "RNG",
    "Captured",
    "Node",
    "Packer",
    "PerRank",
    "Policy",
    "as_bytes",
    "capture",
    "check_savable",
    "dtype_of",
    "elements_of",
    "entries_of",
    "is_stateful",
    "join",
    "leaves",
    "memory_of",
    "memory_of_tensor",
    "named_tuple",
    "names_in",
    "parameters_of",
    "per_rank_of",
    "safetensors_form",
    "sequence_of",
    "tag_of",
    "tagged",
    "unpack",
]

Node = Any
"""A JSON value: None, bool, int, float, str, list, dict."""

_MAX_DEPTH = 100
_LONG = 64
_INT64 = 1 << 63
DICTS: dict[str, Callable[[], dict[Any, Any]]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": Counter,
    **{
        f"$default_{one.__name__}": partial(defaultdict, one) for one in (list, dict, set, tuple, int, float, str, bool)
    },
}
"""Factories of empty dicts, by tag, for all dict types that are preserved."""
_NUMPY = re.compile(r"<[ifc]\d+|\|b1|[|<]u\d+|\|i1")


Policy = Literal["modulo", "keep", "shared", "all", "refuse"]
_POLICIES = ("modulo", "keep", "shared", "all", "refuse")


class PerRank:
    """Marks a value in a state as differing between ranks: each rank saves and loads its own value.

    Samplers, data loaders, random generators, `GradientAverager` and codecs are per rank even without `PerRank`.

    Args:
        obj: Any value that a state may hold.
        on_resize: Policy if p ranks saved the checkpoint and a different number of ranks loads it. "modulo": rank r
            loads the value of rank r mod p. "keep": ranks p and above keep their current value. "shared": like
            "modulo", for values that are valid on any rank, such as a data loader's state; `sync` also sends such
            values. "all": like "shared", but `load_state_dict` receives the list of all p values (`PartitionSampler`
            accepts such a list). "refuse": raises an error.

    Raises:
        ValueError: `on_resize` is unknown.

    Example:
        >>> def program(comm, path):
        ...     un.checkpoint.save(path, {"mine": un.checkpoint.PerRank(comm.rank * 10)}, comm)
        ...     return un.checkpoint.load(path, {"mine": un.checkpoint.PerRank(None)}, comm)["mine"].obj
        >>> import tempfile
        >>> un.launch(program, 2, "thread", (tempfile.mkdtemp(),))
        [0, 10]
    """

    def __init__(self, obj: Any, on_resize: Policy = "modulo") -> None:
        if on_resize not in _POLICIES:
            raise ValueError(f"on_resize must be one of {', '.join(map(repr, _POLICIES))}, not {on_resize!r}")
        self.obj = obj
        self.on_resize = on_resize

    def __repr__(self) -> str:
        return f"PerRank({self.obj!r}, {self.on_resize!r})"


class RNG:
    """The global random generators of this rank: torch's (CPU, and CUDA if used), Python's and numpy's.

    Each rank saves and restores its own generators, even if ranks are threads. If more ranks load a checkpoint than
    saved it, the additional ranks keep their current random state.

    Example:
        >>> saved = un.checkpoint.RNG().state_dict()
        >>> first = torch.rand(1)
        >>> un.checkpoint.RNG().load_state_dict(saved)
        >>> bool(torch.rand(1) == first)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators, by library: "python", "torch", and, if in use, "cuda" and "numpy"."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators from a state; CUDA's and numpy's remain unchanged if the state lacks them.

        Args:
            state: Result of `state_dict`. States of CUDA devices that do not exist here are ignored.
        """
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_available():
            for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(one.cpu(), device)
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            numpy.random.set_state(state["numpy"])


def is_stateful(value: Any) -> bool:
    """Return whether the value has both `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def per_rank_of(value: Any) -> PerRank | None:
    """Return the value as a `PerRank` if it is a `PerRank` or of a type that is always per rank, otherwise None."""
    if isinstance(value, PerRank):
        return value
    if isinstance(value, (RNG, torch.Generator)):
        return PerRank(value, "keep")
    if is_stateful(value) and not isinstance(value, torch.nn.Module):
        # Samplers, averagers and codecs declare a policy as an attribute, because this package must not import their
        # classes.
        policy = getattr(type(value), "checkpoint_policy", None)
        if policy in _POLICIES:
            return PerRank(value, policy)
        if isinstance(value, (torch.utils.data.Sampler, torch.utils.data.DataLoader)):
            return PerRank(value, "shared")
    return None


@dataclass
class Captured:
    """A state split into trees and tensors: a part common to all ranks, and this rank's own part.

    Attributes:
        tree, tensors: The part that is the same on every rank.
        shards: The `TensorShard`s of the state, by name; `tensors` has their local tensors.
        own_trees, own_tensors: This rank's part; the names of its tensors begin with "@rank.".
    """

    tree: Node = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, TensorShard] = field(default_factory=dict)
    own_trees: Sequence[Node] = ()
    own_tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def whole(self) -> dict[str, torch.Tensor]:
        """The tensors that every rank has completely, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.shards}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Size, str | None]]:
    """Return each parameter with its (unsharded) shape, and its name in the optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if pieces := getattr(optimizer, "pieces", None):
        return [(p, piece.shape, piece.name) for p, piece in zip(parameters, pieces, strict=True)]
    names = [n for group in optimizer.param_groups for n in group.get("param_names") or [None] * len(group["params"])]
    return [(p, p.shape, name) for p, name in zip(parameters, names, strict=True)]


def capture(state: Any, rank: int) -> Captured:
    """Split a state into trees and tensors, without copying tensors.

    Raises:
        TypeError: A value cannot be saved; the message names it and its location.
    """
    packer = Packer()
    tree = packer.pack(state)
    inner = Packer(rank)
    trees = [inner.pack(own.obj, path) for path, own in packer.own]
    for optimizer, body in (*packer.optimizers, *inner.optimizers):
        body.append(
            [
                packer.name_of(p) or inner.name_of(p) or name or list(shape)
                for p, shape, name in parameters_of(optimizer)
            ]
        )
    for name in inner.shards:
        raise TypeError(
            f"{name.removeprefix(f'@{rank}.')!r} is a TensorShard in a PerRank value, but all ranks save it together"
        )
    return Captured(tree, packer.tensors, packer.shards, trees, inner.tensors)


class Packer:
    """Packs values into a tree and tensors.

    Args:
        rank: The rank whose per-rank values are packed; None for the state itself.

    Attributes:
        tensors: Tensors that the tree refers to, by name. A tensor that occurs twice is stored once.
        shards: The `TensorShard`s among the tensors.
        optimizers: Optimizers in the state, and their nodes; parameter names are appended to the nodes at the end.
        own: Per-rank values with their paths; the tree refers to them by number.

    Example:
        >>> packer = Packer()
        >>> packer.pack({"w": torch.zeros(2), "lr": (0.1, 7)})
        {'w': {'$tensor': 'w'}, 'lr': {'$tuple': [0.1, 7]}}
    """

    def __init__(self, rank: int | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.shards: dict[str, TensorShard] = {}
        self.optimizers: list[tuple[torch.optim.Optimizer, list[Any]]] = []
        self.own: list[tuple[str, PerRank]] = []
        self._seen: dict[tuple[Any, ...], str] = {}
        self._rank = rank

    def pack(self, value: Any, path: str = "", depth: int = 0) -> Node:
        """Return the tree of a value. Raises a `TypeError` that names a part that cannot be saved, and its location."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"{path!r} nests deeper than {_MAX_DEPTH}, or contains itself")
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if -_INT64 <= value < _INT64 else {"$int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, (torch.Tensor, TensorShard)):
            return {"$tensor": self.keep(value, path)}
        own = per_rank_of(value) if self._rank is None else None
        if own is not None:
            self.own.append((path, own))
            return {"$rank": [len(self.own) - 1, own.on_resize]}
        if isinstance(value, torch.Generator):
            return {"$generator": self.keep(value.get_state(), path)}
        if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
            return self._object(value, path, depth)
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            return self._container(value, path, depth)
        return self._other(value, path)

    def keep(self, value: torch.Tensor | TensorShard, path: str) -> str:
        """Add a tensor to `tensors`, and return its name."""
        shard = value if isinstance(value, TensorShard) else None
        tensor = value.local if isinstance(value, TensorShard) else value
        check_savable(tensor, path)
        memory = memory_of_tensor(value)
        if (shard or tensor.numel()) and memory in self._seen:
            return self._seen[memory]
        # Escape paths that begin with "@", because this prefix marks per-rank tensors.
        name = "~" + path if path.startswith("@") else path or "state"
        name = base = name if self._rank is None else f"@{self._rank}.{name}"
        number = 1
        while name in self.tensors:
            number += 1
            name = f"{base}~{number}"
        self.tensors[name] = tensor.detach()
        if shard:
            self.shards[name] = shard
        self._seen[memory] = name
        return name

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return the name of an optimizer's parameter in `tensors`; None if it was not added."""
        return self._seen.get(memory_of_tensor(parameter)) if parameter.data_ptr() else None

    def _object(self, value: Any, path: str, depth: int) -> Node:
        state = value.state_dict()
        body = [f"{type(value).__module__}.{type(value).__qualname__}", self.pack(state, path, depth + 1)]
        known = getattr(state, "_metadata", None)
        if isinstance(known, dict):
            # Modules recognise older formats of their state by a version number. Most modules have version 1, which is
            # omitted.
            versions = {name: one for name, one in known.items() if one != {"version": 1}}
            body.append(self.pack(versions, f"{path}._metadata", depth + 1))
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append((value, body))
        return {"$state": body}

    def _container(self, value: Any, path: str, depth: int) -> Node:
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        if isinstance(value, (set, frozenset)):
            items = [self.pack(item, f"{path}.{i}", depth + 1) for i, item in enumerate(sorted(value, key=_rank))]
            return {"$frozenset" if isinstance(value, frozenset) else "$set": items}
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        if hasattr(value, "_fields"):
            nodes = [self.pack(item, join(path, i), depth + 1) for i, item in enumerate(value)]
            return {"$named": [type(value).__module__, type(value).__qualname__, nodes]}
        node = self._numbers(value, path) if len(value) >= _LONG else None
        if node is None:
            node = [self.pack(item, join(path, i), depth + 1) for i, item in enumerate(value)]
        return {"$tuple": node} if isinstance(value, tuple) else node

    def _numbers(self, value: Any, path: str) -> Node | None:
        """Return a list of integers or floats as a tensor, which takes less space in the file and in memory.

        None if the list has other or mixed elements, or integers of more than 64 bits.
        """
        kinds = {*map(type, value)}
        if kinds == {float}:
            dtype = torch.float64
        elif kinds == {int} and all(-_INT64 <= item < _INT64 for item in value):
            dtype = torch.int64
        else:
            return None
        return {"$numbers": self.keep(torch.tensor(value, dtype=dtype), path)}

    def _dict(self, value: Any, path: str, depth: int) -> Node:
        tag = "$ordered" if isinstance(value, OrderedDict) else "$counter" if isinstance(value, Counter) else None
        if isinstance(value, defaultdict):
            found = f"$default_{getattr(value.default_factory, '__name__', None)}"
            tag = found if found in DICTS else None
        if tag is None and {*map(type, value)} <= {str} and "$" not in {key[:1] for key in value}:
            start = f"{path}." if path else ""
            return {key: self.pack(item, start + key, depth + 1) for key, item in value.items()}
        pairs = [
            [self.pack(key, f"{path} (a key)", depth + 1), self.pack(item, join(path, key), depth + 1)]
            for key, item in value.items()
        ]
        return {tag or "$dict": pairs}

    def _other(self, value: Any, path: str) -> Node:
        if isinstance(value, (bytes, bytearray)):
            tag = "$bytearray" if isinstance(value, bytearray) else "$bytes"
            if len(value) < 1024:
                return {tag: base64.b64encode(value).decode()}
            return {tag: {"$tensor": self.keep(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)}}
        if isinstance(value, Enum):
            kind = type(value)
            return {"$enum": [kind.__module__, kind.__qualname__, value.name, self.pack(value.value, path)]}
        if isinstance(value, complex):
            return {"$complex": [repr(value.real), repr(value.imag)]}
        if isinstance(value, range):
            return {"$range": [value.start, value.stop, value.step]}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            return self._array(numpy, value, path)
        raise TypeError(
            f"{path!r} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved; give it "
            "state_dict and load_state_dict, or save it as numbers, strings, bytes, tensors and containers"
        )

    def _array(self, numpy: Any, value: Any, path: str) -> Node:
        if isinstance(value, numpy.ma.MaskedArray):
            raise TypeError(f"{path!r} is a masked array, which would lose its mask; save its data and its mask")
        array = numpy.asarray(value)
        array = numpy.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(array.shape)
        if not _NUMPY.fullmatch(array.dtype.str):
            raise TypeError(f"{path!r} is a numpy array of {array.dtype}, which cannot be saved; save numbers")
        flat = (
            torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.nbytes else torch.empty(0).byte()
        )
        tag = "$array" if isinstance(value, numpy.ndarray) else "$scalar"
        return {tag: [array.dtype.str, list(array.shape), self.keep(flat, path)]}


def memory_of_tensor(value: torch.Tensor | TensorShard) -> tuple[Any, ...]:
    """Key that is equal for two tensors that view the same memory in the same way.

    A `TensorShard` is identified by its `id`, because on some ranks it has no elements and no address.
    """
    if isinstance(value, TensorShard):
        return (id(value),)
    seen_as = (value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
    return value.data_ptr(), value.device, *seen_as


def join(path: str, key: object) -> str:
    """The path of a container's entry."""
    return f"{path}.{key}" if path else str(key)


def _rank(item: object) -> tuple[str, Any]:
    """Sort key for members of a set, the same on every rank if the members can be ordered."""
    return type(item).__name__, item if isinstance(item, (int, float, str, bytes)) else repr(item)


def tag_of(node: Node) -> str | None:
    """Return the tag of a node that represents a value of a type that JSON lacks; None for other nodes."""
    if isinstance(node, dict) and len(node) == 1:
        (key,) = node
        return key if isinstance(key, str) and key.startswith("$") else None
    return None


def tagged(tree: Node) -> Iterator[tuple[str, Any]]:
    """Yield each tagged value's tag and content. The search is breadth-first, because a hostile tree may be deep."""
    level = [tree]
    for _ in range(4 * _MAX_DEPTH):
        inner: list[Node] = []
        for node in level:
            if isinstance(node, dict):
                tag = tag_of(node)
                if tag is not None:
                    yield tag, node[tag]
                inner += node.values()
            elif isinstance(node, list):
                inner += node
        if not inner:
            return
        level = inner
    raise FormatError(f"its state nests deeper than {4 * _MAX_DEPTH}")


def names_in(node: Node) -> Iterator[str]:
    """Names of all tensors that a tree refers to."""
    for tag, body in tagged(node):
        if tag in ("$tensor", "$numbers", "$generator"):
            yield str(body)
        elif tag in ("$array", "$scalar"):
            yield str(body[2])


def leaves(node: Node, path: str = "") -> dict[str, str]:
    """Return each leaf of a tree as JSON text, by path; for a tensor, only its name.

    Leaves can share a path, because keys may contain dots; their texts are joined.
    """
    if isinstance(node, dict) and "$tensor" not in node:
        inside = [(f"{path}.{key}" if path else key, item) for key, item in node.items()]
    elif isinstance(node, list):
        inside = [(f"{path}.{index}", item) for index, item in enumerate(node)]
    else:
        # Add a suffix, because `PreparedState.describe` also has tensors' names as keys, and one may equal the path.
        return {f"{path} (which tensor)" if isinstance(node, dict) else path: json.dumps(node)}
    if not inside:
        return {path: json.dumps(node)}
    found: dict[str, str] = {}
    for key, item in inside:
        for name, text in leaves(item, key).items():
            found[name] = f"{found[name]}, {text}" if name in found else text
    return found


def entries_of(node: Node) -> dict[Any, Node] | None:
    """A saved dict's values by key; None if the node is not a dict, or has keys that are stored as tensors."""
    tag = tag_of(node)
    if tag in DICTS:
        if any(True for key, _ in node[tag] for _ in names_in(key)):
            return None
        return {unpack(key, _no_tensor): item for key, item in node[tag]}
    return node if isinstance(node, dict) and tag is None else None


def _no_tensor(name: str) -> torch.Tensor:
    raise ValueError("a tensor cannot be a key")


def elements_of(node: Node) -> list[Node] | None:
    """Elements of a saved list or tuple; None if the node is neither."""
    tag = tag_of(node)
    body = node["$tuple"] if tag == "$tuple" else node["$named"][2] if tag == "$named" else node
    return body if isinstance(body, list) else None


def sequence_of(node: Node, items: list[Any]) -> list[Any] | tuple[Any, ...]:
    """Return the items in a sequence of the type that was saved."""
    if tag_of(node) == "$named":
        module, name, _ = node["$named"]
        return named_tuple(module, name, tuple(items))
    return tuple(items) if tag_of(node) == "$tuple" else items


def unpack(
    node: Node, tensor: Callable[[str], torch.Tensor], per_rank: Callable[[int, str], Node] | None = None
) -> Any:
    """Return the value that `Packer.pack` packed into a tree, with plain values in place of objects.

    Args:
        node: The tree.
        tensor: Function that returns the tensor with a given name.
        per_rank: Function that returns the tree of a per-rank value with a given number and policy, or None if this
            rank has no such value, which then becomes None. Without this function, a per-rank value is an error.

    Raises:
        ValueError, TypeError, KeyError: The tree is not one that `pack` produces.
    """

    def inner(item: Node) -> Any:
        return unpack(item, tensor, per_rank)

    tag = tag_of(node)
    if tag is None:
        if isinstance(node, dict):
            return {key: inner(item) for key, item in node.items()}
        return [inner(item) for item in node] if isinstance(node, list) else node
    body = node[tag]
    if tag == "$rank" and per_rank is not None:
        return inner(per_rank(*body))
    if tag not in _READ:
        raise ValueError(f"there is a value of the unknown kind {tag!r}")
    return _READ[tag](body, inner, tensor)


_Inner = Callable[[Node], Any]
_Named = Callable[[str], torch.Tensor]
_Type = TypeVar("_Type")


def _member(body: Any, inner: _Inner) -> Any:
    """Return an Enum member, or the member's value if the class is not imported or has no such member."""
    module, qualname, name, node = body
    kind = _imported(module, qualname, Enum)
    if kind is not None and name in kind.__members__:
        return kind[name]
    return kind(inner(node)) if kind is not None and issubclass(kind, Flag) else inner(node)


def named_tuple(module: str, name: str, made: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the items as a named tuple, or unchanged if the class is not imported or has other fields."""
    kind = _imported(module, name, tuple)
    return tuple.__new__(kind, made) if kind is not None and len(getattr(kind, "_fields", ())) == len(made) else made


def _imported(module: str, name: str, base: type[_Type]) -> type[_Type] | None:
    """Return a class only if its module is already imported (or the class is registered): a file cannot run code."""
    found = class_of(f"{module}:{name}")
    return found if found is not None and issubclass(found, base) else None


def _filled(make: Callable[[], dict[Any, Any]], body: Any, inner: _Inner, tensor: _Named) -> dict[Any, Any]:
    made = make()
    for key, item in body:
        # A Counter's `update` would add to the counts instead of replacing them.
        made[inner(key)] = inner(item)
    return made


def _bytes(body: Any, inner: _Inner) -> bytes:
    if isinstance(body, str):
        return base64.b64decode(body, validate=True)
    flat = as_bytes(inner(body).cpu())
    return bytes(memory_of(flat))


def _array(body: Any, tensor: _Named) -> Any:
    try:
        import numpy as np
    except ImportError as error:
        raise ValueError("it has numpy arrays; install numpy to load it") from error
    kind, shape, name = body
    if not isinstance(kind, str) or not _NUMPY.fullmatch(kind):
        raise ValueError(f"there is an array of the unknown kind {kind!r}")
    flat = as_bytes(tensor(name).cpu())
    return np.frombuffer(bytearray(memory_of(flat)), dtype=kind).reshape(shape)


_READ: dict[str, Callable[[Any, _Inner, _Named], Any]] = {
    "$tensor": lambda body, inner, tensor: tensor(body),
    "$generator": lambda body, inner, tensor: tensor(body),
    "$state": lambda body, inner, tensor: inner(body[1]),
    "$numbers": lambda body, inner, tensor: tensor(body).tolist(),
    "$tuple": lambda body, inner, tensor: tuple(inner(body)),
    "$set": lambda body, inner, tensor: set(inner(body)),
    "$frozenset": lambda body, inner, tensor: frozenset(inner(body)),
    "$size": lambda body, inner, tensor: torch.Size(body),
    **{tag: partial(_filled, make) for tag, make in DICTS.items()},
    "$named": lambda body, inner, tensor: named_tuple(body[0], body[1], tuple(map(inner, body[2]))),
    "$enum": lambda body, inner, tensor: _member(body, inner),
    "$bytes": lambda body, inner, tensor: _bytes(body, inner),
    "$bytearray": lambda body, inner, tensor: bytearray(_bytes(body, inner)),
    "$int": lambda body, inner, tensor: int(body, 16),
    "$float": lambda body, inner, tensor: float(body),
    "$complex": lambda body, inner, tensor: complex(float(body[0]), float(body[1])),
    "$range": lambda body, inner, tensor: range(*body),
    "$dtype": lambda body, inner, tensor: dtype_of(body),
    "$device": lambda body, inner, tensor: torch.device(body),
    "$array": lambda body, inner, tensor: _array(body, tensor),
    "$scalar": lambda body, inner, tensor: _array(body, tensor).reshape(())[()],
}


_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
# Not every safetensors reader supports complex numbers, so they are stored as pairs; the manifest records the complex
# dtype.
_PAIRS = {"bcomplex32": "BF16", "complex32": "F16", "complex64": "F32", "complex128": "F64"}
# Dtypes whose elements are stored as opaque uint8 values.
_OPAQUE = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")

_KNOWN: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_SAFETENSORS, *_PAIRS, *_OPAQUE) if hasattr(torch, name)
}


DTYPE_NAMES = {dtype: name for name, dtype in _KNOWN.items()}
"""Names of dtypes in the manifest, such as "float32"."""


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype called `name`; raises `ValueError` if this version of torch lacks it."""
    if not isinstance(name, str) or name not in _KNOWN:
        raise ValueError(f"no dtype {name!r} in torch {torch.__version__}")
    return _KNOWN[name]


def check_savable(tensor: torch.Tensor, name: str) -> None:
    """Raise a `TypeError` that names the tensor, unless its elements are plain bytes in memory."""
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(f"{name!r} has no shape yet: run the model once before saving it")
    if has_no_storage(tensor):
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__}, whose elements are not in its own memory; save plain tensors "
            "instead, such as a DTensor's full_tensor()"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
        kind = tensor.layout if tensor.layout != torch.strided else tensor.dtype
        raise TypeError(f"{name!r} is a tensor of {kind}, which cannot be saved; save dense tensors instead")
    if tensor.device.type == "meta":
        raise TypeError(f"{name!r} is on the meta device: it has a shape, but no elements to save")


def safetensors_form(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """Return the dtype and shape that a tensor has in a safetensors file.

    Example:
        >>> safetensors_form(torch.complex64, (3,))
        ('F32', [3, 2])
    """
    name = DTYPE_NAMES[dtype]
    if name in _PAIRS:
        return _PAIRS[name], [*shape, 2]
    return _SAFETENSORS.get(name, "U8"), list(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a CPU tensor's elements in order: a view if the tensor is contiguous, else a copy."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not dense.numel():
        return torch.empty(0, dtype=torch.uint8)
    # Unlike view(-1), as_strided gives stride 1 even to a single element.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def memory_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous uint8 CPU tensor, without a copy. The tensor must outlive the memoryview."""
    return view_of(flat) if flat.numel() else memoryview(b"")
