"""Codecs for Python's built-in values: numbers, text, bytes, containers."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from unisono.serialization.format import (
    Decoder,
    Encoder,
    Parts,
    UnsendableError,
    View,
    add_decoders,
    decoders,
    encoders,
    head,
    put_text,
    read,
    take_bytes,
    take_length,
    take_text,
    write,
)

__all__ = ["put_items", "take_items"]

_INT64 = struct.Struct("<Bq")
_FLOAT = struct.Struct("<Bd")
_COMPLEX = struct.Struct("<Bdd")
_INT, _REAL, _TWO_REALS = (ord(kind) for kind in "ifc")
_TOO_DEEP = "nests deeper than 100 levels, or contains itself"


def put_items(parts: Parts, items: Iterable[object], depth: int) -> None:
    """Append several items one after another; an error's path contains the item's index."""
    if not depth:
        raise ValueError(f"the value {_TOO_DEEP}")
    depth -= 1
    index = 0
    try:
        for index, item in enumerate(items):  # noqa: B007
            encoder = encoders.get(type(item))
            if encoder is None:
                write(parts, item, depth)
            else:
                encoder(parts, item, depth)
    except UnsendableError as error:
        error.path.append(f"[{index}]")
        raise


def take_items(view: View, at: int, depth: int) -> tuple[list[Any], int]:
    """Read the number of items and the items. Return the items, and the offset after them."""
    if not depth:
        raise ValueError(f"their value {_TOO_DEEP}")
    depth -= 1
    count, at = take_length(view, at)
    items = []
    for _ in range(count):
        item, at = decoders[view[at]](view, at + 1, depth)
        items.append(item)
    return items, at


# -- numbers, text and bytes -----------------------------------------------------------------------
def _put_none(parts: Parts, _value: None, _depth: int) -> None:
    parts.append(b"N")


def _put_bool(parts: Parts, value: bool, _depth: int) -> None:
    parts.append(b"T" if value else b"F")


def _put_int(parts: Parts, value: int, _depth: int) -> None:
    if -(2**63) <= value < 2**63:
        parts.append(_INT64.pack(_INT, value))
    else:
        content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        parts.extend((head("I", len(content)), content))


def _take_int(view: View, at: int, _depth: int) -> tuple[int, int]:
    return _INT64.unpack_from(view, at - 1)[1], at + 8


def _take_big_int(view: View, at: int, _depth: int) -> tuple[int, int]:
    content, at = take_bytes(view, at)
    return int.from_bytes(content, "little", signed=True), at


def _put_float(parts: Parts, value: float, _depth: int) -> None:
    parts.append(_FLOAT.pack(_REAL, value))


def _take_float(view: View, at: int, _depth: int) -> tuple[float, int]:
    return _FLOAT.unpack_from(view, at - 1)[1], at + 8


def _put_complex(parts: Parts, value: complex, _depth: int) -> None:
    parts.append(_COMPLEX.pack(_TWO_REALS, value.real, value.imag))


def _take_complex(view: View, at: int, _depth: int) -> tuple[complex, int]:
    _, real, imag = _COMPLEX.unpack_from(view, at - 1)
    return complex(real, imag), at + 16


def _bytes(kind: str, cls: type[bytes] | type[bytearray]) -> tuple[Encoder, Decoder]:
    def encoder(parts: Parts, value: bytes | bytearray, _depth: int) -> None:
        parts.extend((head(kind, len(value)), value))

    def decoder(view: View, at: int, _depth: int) -> tuple[bytes | bytearray, int]:
        content, at = take_bytes(view, at)
        return cls(content), at

    return encoder, decoder


# -- containers ------------------------------------------------------------------------------------
def _sequence(kind: str, cls: type[list[Any]] | type[tuple[Any, ...]]) -> tuple[Encoder, Decoder]:
    def encoder(parts: Parts, value: Collection[Any], depth: int) -> None:
        parts.append(head(kind, len(value)))
        put_items(parts, value, depth)

    def decoder(view: View, at: int, depth: int) -> tuple[Any, int]:
        items, at = take_items(view, at, depth)
        return (items if cls is list else cls(items)), at

    return encoder, decoder


def _set(kind: str, cls: type[set[Any]] | type[frozenset[Any]]) -> tuple[Encoder, Decoder]:
    # Sort the encoded items: a set's order differs between processes, but its encoding must not, because ranks compare
    # encoded values.
    def encoder(parts: Parts, value: Collection[Any], depth: int) -> None:
        items = []
        for item in value:
            inner: Parts = []
            put_items(inner, (item,), depth)
            items.append(b"".join(inner))
        parts.append(head(kind, len(items)))
        parts.extend(sorted(items))

    def decoder(view: View, at: int, depth: int) -> tuple[Any, int]:
        items, at = take_items(view, at, depth)
        return cls(items), at

    return encoder, decoder


def _mapping(kind: str, cls: type[dict[Any, Any]]) -> tuple[Encoder, Decoder]:
    # Encode all keys first, and then all values.
    def encoder(parts: Parts, value: dict[Any, Any], depth: int) -> None:
        parts.append(head(kind, len(value)))
        put_items(parts, value, depth)
        for key, item in value.items():
            try:
                write(parts, item, depth - 1)
            except UnsendableError as error:
                error.path.append(f"[{key!r}]")
                raise

    def decoder(view: View, at: int, depth: int) -> tuple[Any, int]:
        keys, at = take_items(view, at, depth)
        mapping = cls()
        for key in keys:
            mapping[key], at = read(view, at, depth - 1)
        return mapping, at

    return encoder, decoder


def _three(kind: str, cls: type[slice] | type[range]) -> tuple[Encoder, Decoder]:
    def encoder(parts: Parts, value: slice | range, depth: int) -> None:
        parts.append(head(kind, 3))
        put_items(parts, (value.start, value.stop, value.step), depth)

    def decoder(view: View, at: int, depth: int) -> tuple[slice | range, int]:
        items, at = take_items(view, at, depth)
        start, stop, step = items
        return cls(start, stop, step), at

    return encoder, decoder


# -- registration ----------------------------------------------------------------------------------
encoders.update(
    {
        type(None): _put_none,
        bool: _put_bool,
        int: _put_int,
        float: _put_float,
        complex: _put_complex,
        str: put_text,
    }
)
add_decoders(
    {
        "N": lambda _view, at, _depth: (None, at),
        "T": lambda _view, at, _depth: (True, at),
        "F": lambda _view, at, _depth: (False, at),
        "i": _take_int,
        "I": _take_big_int,
        "f": _take_float,
        "c": _take_complex,
        "s": take_text,
    }
)
_CLASSES: tuple[tuple[str, type, Callable[[str, Any], tuple[Encoder, Decoder]]], ...] = (
    ("b", bytes, _bytes),
    ("B", bytearray, _bytes),
    ("l", list, _sequence),
    ("t", tuple, _sequence),
    ("S", set, _set),
    ("Z", frozenset, _set),
    ("d", dict, _mapping),
    ("O", OrderedDict, _mapping),
    ("L", slice, _three),
    ("R", range, _three),
)
for _kind, _cls, _codec in _CLASSES:
    encoders[_cls], decoders[ord(_kind)] = _codec(_kind, _cls)
