"""Values as JSON and back: the shape of a state, with tensors by name. Nothing in it can run code.

A dict with one key that begins with `$` is a value that JSON has no word for.
"""

from __future__ import annotations

import base64
import ctypes
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, Flag
from functools import partial
from typing import Any, TypeVar

import torch

from unisono.checkpoint.errors import FormatError
from unisono.core.tensor_shard import TensorShard
from unisono.serialization.tensors import has_no_storage

__all__ = [
    "DICTS",
    "GRANTED",
    "HELD",
    "MAX_DEPTH",
    "OF_MANIFEST",
    "Node",
    "Packer",
    "as_bytes",
    "check_cost",
    "check_savable",
    "check_trees",
    "cost_of",
    "dtype_of",
    "join",
    "memory_of",
    "memory_of_tensor",
    "name_of",
    "named_tuple",
    "names_in",
    "safetensors_form",
    "tag_of",
    "unpack",
]

Node = Any
"""A value as JSON has it: None, bool, int, float, str, list, dict."""

MAX_DEPTH = 100
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
"""Makers of empty dicts of all types that are kept, by their tags."""
_NUMPY = re.compile(r"<[ifc]\d+|\|b1|[|<]u\d+|\|i1")


class Packer:
    """Packer of values into a tree and tensors.

    Args:
        special: Called first for each value; returns a node, or None for an ordinary value.
        prefix: Prefix of the names of tensors.

    Attributes:
        tensors: Tensors that the tree refers to, by name. A tensor that occurs twice is stored once.
        shards: The `TensorShard`s among them.
        optimizers: Optimizers that `special` has met, and their nodes: names of parameters are added at the end.

    Example:
        >>> packer = Packer()
        >>> packer.pack({"w": torch.zeros(2), "lr": (0.1, 7)})
        {'w': {'$tensor': 'w'}, 'lr': {'$tuple': [0.1, 7]}}
    """

    def __init__(self, special: Callable[[Packer, Any, str, int], Node | None] | None = None, prefix: str = "") -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.shards: dict[str, TensorShard] = {}
        self.optimizers: list[tuple[torch.optim.Optimizer, list[Any]]] = []
        self._seen: dict[tuple[Any, ...], str] = {}
        self._special = special
        self._prefix = prefix

    def pack(self, value: Any, path: str = "", depth: int = 0) -> Node:
        """The tree of a value. `TypeError` names the part that cannot be saved, and its place."""
        if depth > MAX_DEPTH:
            raise ValueError(f"{path!r} nests deeper than {MAX_DEPTH}, or contains itself")
        node = self._special(self, value, path, depth) if self._special else None
        if node is not None:
            return node
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if -_INT64 <= value < _INT64 else {"$int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, (torch.Tensor, TensorShard)):
            return {"$tensor": self.keep(value, path)}
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            return self._container(value, path, depth)
        return self._other(value, path)

    def keep(self, value: torch.Tensor | TensorShard, path: str) -> str:
        """The name under which a tensor is kept."""
        shard = value if isinstance(value, TensorShard) else None
        tensor = value.local if isinstance(value, TensorShard) else value
        check_savable(tensor, path)
        memory = memory_of_tensor(value)
        if (shard or tensor.numel()) and memory in self._seen:
            return self._seen[memory]
        # "@" begins the names of what belongs to one rank.
        name = base = self._prefix + ("~" + path if path.startswith("@") else path or "state")
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
        """Return the name under which a parameter of an optimizer is kept; None if it is not."""
        return self._seen.get(memory_of_tensor(parameter)) if parameter.data_ptr() else None

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
        node = self._numbers(value, path)
        if node is None:
            node = [self.pack(item, join(path, i), depth + 1) for i, item in enumerate(value)]
        return {"$tuple": node} if isinstance(value, tuple) else node

    def _numbers(self, value: Any, path: str) -> Node | None:
        """A long list of whole numbers, or of floats, as a tensor: shorter in the file and in memory."""
        if len(value) < _LONG:
            return None
        kind = type(value[0])
        if kind not in (int, float) or any(type(item) is not kind for item in value):
            return None
        if kind is int and not all(-_INT64 <= item < _INT64 for item in value):
            return None
        dtype = torch.int64 if kind is int else torch.float64
        return {"$numbers": self.keep(torch.tensor(value, dtype=dtype), path)}

    def _dict(self, value: Any, path: str, depth: int) -> Node:
        tag = "$ordered" if isinstance(value, OrderedDict) else "$counter" if isinstance(value, Counter) else None
        if isinstance(value, defaultdict):
            found = f"$default_{getattr(value.default_factory, '__name__', None)}"
            tag = found if found in DICTS else None
        plain = all(type(key) is str for key in value) and not any(key.startswith("$") for key in value)
        if plain and tag is None:
            return {key: self.pack(item, join(path, key), depth + 1) for key, item in value.items()}
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
            return {"$dtype": name_of(value)}
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
    """Key that is equal for two tensors if they are the same elements of the same memory.

    Shards are known by their object, because on some ranks they have no memory.
    """
    if isinstance(value, TensorShard):
        return (id(value),)
    seen_as = (value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
    return value.data_ptr(), value.device, *seen_as


def join(path: str, key: object) -> str:
    """The path of what a container holds under a key."""
    return f"{path}.{key}" if path else str(key)


def _rank(item: object) -> tuple[str, Any]:
    """An order for members of a set that is the same on every rank, where they have one."""
    return type(item).__name__, item if isinstance(item, (int, float, str, bytes)) else repr(item)


def tag_of(node: Node) -> str | None:
    """Tag of a node for a kind of value that JSON does not have; None for others."""
    if isinstance(node, dict) and len(node) == 1:
        (key,) = node
        return key if isinstance(key, str) and key.startswith("$") else None
    return None


def names_in(node: Node) -> Iterator[str]:
    """Every tensor that a tree refers to."""
    tag = tag_of(node)
    if tag in ("$tensor", "$numbers"):
        yield str(node[tag])
    elif tag in ("$array", "$scalar"):
        yield str(node[tag][2])
    elif isinstance(node, dict):
        for item in node.values():
            yield from names_in(item)
    elif isinstance(node, list):
        for item in node:
            yield from names_in(item)


def unpack(node: Node, tensor: Callable[[str], torch.Tensor], special: Callable[[str, Any], Any] | None = None) -> Any:
    """The value of a tree: the inverse of `Packer.pack`.

    Args:
        node: The tree.
        tensor: The tensor of a name.
        special: What a tag means that this module does not know, such as an object's state.

    Raises:
        ValueError, TypeError, KeyError: The tree is not one that `pack` makes.
    """

    def inner(item: Node) -> Any:
        return unpack(item, tensor, special)

    tag = tag_of(node)
    if tag is None:
        if isinstance(node, dict):
            return {key: inner(item) for key, item in node.items()}
        return [inner(item) for item in node] if isinstance(node, list) else node
    body = node[tag]
    if tag in _READ:
        return _READ[tag](body, inner, tensor)
    if special is None:
        raise ValueError(f"there is a value of the unknown kind {tag!r}")
    return special(tag, body)


_Inner = Callable[[Node], Any]
_Named = Callable[[str], torch.Tensor]
_Type = TypeVar("_Type")


def _member(body: Any, inner: _Inner) -> Any:
    """The member of an Enum; its value if the class is not imported, or has no such member."""
    module, qualname, name, node = body
    kind = _imported(module, qualname, Enum)
    if kind is not None and name in kind.__members__:
        return kind[name]
    return kind(inner(node)) if kind is not None and issubclass(kind, Flag) else inner(node)


def named_tuple(module: str, name: str, made: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the items in a named tuple; as they are if the class is not imported, or has other fields."""
    kind = _imported(module, name, tuple)
    return tuple.__new__(kind, made) if kind is not None and len(getattr(kind, "_fields", ())) == len(made) else made


def _imported(module: str, name: str, base: type[_Type]) -> type[_Type] | None:
    """A class, if its module is imported already: a file cannot have code run."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, base) else None


def _pairs(body: Any, inner: _Inner) -> list[tuple[Any, Any]]:
    return [(inner(key), inner(item)) for key, item in body]


def _filled(make: Callable[[], dict[Any, Any]], body: Any, inner: _Inner, tensor: _Named) -> dict[Any, Any]:
    made = make()
    for key, item in _pairs(body, inner):
        # A Counter's `update` would add.
        made[key] = item
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
# Not every reader of safetensors knows complex numbers: they are pairs there, and the manifest says so.
_PAIRS = {"bcomplex32": "BF16", "complex32": "F16", "complex64": "F32", "complex128": "F64"}
# Each element is stored as one byte, whatever it means.
_OPAQUE = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")

_KNOWN: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_SAFETENSORS, *_PAIRS, *_OPAQUE) if hasattr(torch, name)
}


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype in the manifest, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    """The dtype of that name; `ValueError` if this torch has none such."""
    if not isinstance(name, str) or name not in _KNOWN:
        raise ValueError(f"no dtype {name!r} in torch {torch.__version__}")
    return _KNOWN[name]


def check_savable(tensor: torch.Tensor, name: str) -> None:
    """`TypeError` that names the tensor unless its elements are plain bytes in memory."""
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(f"{name!r} has no shape yet: run the model once before saving it")
    if has_no_storage(tensor):
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__}, whose elements are not in its own memory; save plain tensors "
            "instead, such as a DTensor's full_tensor()"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or name_of(tensor.dtype) not in _KNOWN:
        kind = tensor.layout if tensor.layout != torch.strided else tensor.dtype
        raise TypeError(f"{name!r} is a tensor of {kind}, which cannot be saved; save dense tensors instead")
    if tensor.device.type == "meta":
        raise TypeError(f"{name!r} is on the meta device: it has a shape, but no elements to save")


def safetensors_form(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """The dtype and shape of such a tensor in a safetensors file.

    Example:
        >>> safetensors_form(torch.complex64, (3,))
        ('F32', [3, 2])
    """
    name = name_of(dtype)
    if name in _PAIRS:
        return _PAIRS[name], [*shape, 2]
    return _SAFETENSORS.get(name, "U8"), list(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a CPU tensor in order, as n uint8 values: a view if it is contiguous, else a copy."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not dense.numel():
        return torch.empty(0, dtype=torch.uint8)
    # Unlike view(-1), this has stride 1 also where there is only one element.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def memory_of(flat: torch.Tensor) -> memoryview:
    """The memory of contiguous uint8 values on the CPU, without a copy. The tensor must outlive it."""
    if not flat.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")


GRANTED = 16 << 20
"""Bytes that any checkpoint may take beyond twice its files: Python's values are much longer than their JSON."""
OF_MANIFEST = 24
"""Bytes for each byte of a manifest: what the entries of the smallest tensors take, by the costs below."""
HELD = 4 << 20
"""Bytes a rank up to which tensors are held in memory until all are known to be intact."""

# Largest cost of a JSON delimiter, in bytes of the parsed values and of those built from them; measured.
_MARKS = {b",": 66, b"[": 118, b"{": 207, b'"': 48}
# A number in a list: its slot and the object.
_NUMBER = 40
_COPIED = ("$array", "$scalar", "$bytes", "$bytearray")


def cost_of(text: bytes | bytearray) -> int:
    """Bytes of memory that values may take beyond `OF_MANIFEST` times the text that they are parsed from."""
    return max(0, sum(text.count(mark) * cost for mark, cost in _MARKS.items()) - OF_MANIFEST * len(text))


def check_cost(cost: int, nbytes: int) -> None:
    """Raise `FormatError` if `cost` exceeds the limit of a checkpoint with `nbytes` bytes of tensors.

    Tensors that are held exist twice: twice the files already. Larger ones have a single copy, which leaves the memory
    of a second one.
    """
    if cost > GRANTED + max(0, nbytes - HELD):
        raise FormatError(
            f"its values take about {cost >> 20} MiB of memory, too much for {nbytes} bytes of files; "
            "keep long lists and dicts as tensors"
        )


def check_trees(
    state: Node, per_rank: Iterable[Iterable[Node]], sizes: Mapping[str, tuple[int, int]], text: int, nbytes: int
) -> None:
    """Raise `FormatError` or `ValueError` if values of these trees repeat without bound, or take too much memory.

    Args:
        state, per_rank: As in a manifest.
        sizes: For each tensor, its numbers of elements and bytes.
        text: Memory cost of the trees themselves.
        nbytes: Bytes of all files.
    """
    referred: set[Any] = set()
    cost = text
    trees = [tree for trees in per_rank for tree in trees]
    for top in (state, trees):
        for tag, body in _tagged(top):
            if tag == "$numbers":
                cost += sizes[body][0] * _NUMBER
            elif tag in _COPIED and not isinstance(body, str):
                cost += 2 * sizes[body["$tensor"] if isinstance(body, dict) else body[2]][1]
            elif tag == "$rank":
                if top is trees or type(body[0]) is not int or body[0] < 0 or body[0] in referred:
                    raise ValueError("a value of one rank appears in two places")
                referred.add(body[0])
    check_cost(cost, nbytes)


def _tagged(tree: Node) -> Iterator[tuple[str, Any]]:
    """Every value with a tag; level by level, because a hostile tree may be deep."""
    level = [tree]
    for _ in range(4 * MAX_DEPTH):
        for node in level:
            tag = tag_of(node)
            if tag is not None:
                yield tag, node[tag]
        level = [item for node in level if isinstance(node, (dict, list)) for item in _items(node)]
        if not level:
            return
    raise FormatError(f"its state nests deeper than {4 * MAX_DEPTH}")


def _items(node: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return iter(node.values()) if isinstance(node, dict) else iter(node)
