"""Byte format of a value: one byte for its kind, its length if the length varies, and its content."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = [
    "MAX_DEPTH",
    "TOO_SHORT",
    "Buffer",
    "Decoder",
    "Encoder",
    "Parts",
    "UnsendableError",
    "View",
    "add_decoders",
    "decoders",
    "encoders",
    "finders",
    "head",
    "put_text",
    "read",
    "take_bytes",
    "take_length",
    "take_text",
    "write",
]

MAX_DEPTH = 100
"""Maximum nesting depth of containers. The limit also detects containers that contain themselves."""

Buffer = bytes | bytearray | memoryview
Parts = list[Buffer]
Encoder = Callable[[Parts, Any, int], None]
View = bytes | memoryview
Decoder = Callable[[View, int, int], tuple[Any, int]]


def _unknown(view: View, at: int, _depth: int) -> NoReturn:
    raise ValueError(f"there is no kind {view[at - 1]}")


encoders: dict[type, Encoder] = {}
decoders: list[Decoder] = [_unknown] * 256
"""The decoder for each kind byte. A decoder may read past the end of its input: `decode` handles the IndexError."""

finders: list[Callable[[type], Encoder | None]] = []
"""Functions that are called in turn to find the encoder of a type that `encoders` does not contain."""

TOO_SHORT = "they end too early"

_LENGTH = struct.Struct("<Q")
_LONG = 255
_TEXT_HEADS = tuple(bytes((ord("s"), length)) for length in range(_LONG))


def add_decoders(kinds: Mapping[str, Decoder]) -> None:
    """Register the decoder for each kind."""
    for kind, decoder in kinds.items():
        decoders[ord(kind)] = decoder


class UnsendableError(Exception):
    """Raised for a value that cannot be sent. Each container around the value adds an element to `path`."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind
        self.path: list[str] = []


def write(parts: Parts, value: object, depth: int) -> None:
    """Append the bytes of one item."""
    encoder = encoders.get(type(value)) or _find(type(value))
    if encoder is None:
        raise UnsendableError(_description(value))
    encoder(parts, value, depth)


def read(view: View, at: int, depth: int) -> tuple[Any, int]:
    """Return the item that begins at `at`, and the offset of the next item."""
    return decoders[view[at]](view, at + 1, depth)


def head(kind: str, length: int) -> bytes:
    """Return the encoded kind and length; two bytes if the length is small."""
    return bytes((ord(kind), length)) if length < _LONG else bytes((ord(kind), _LONG)) + _LENGTH.pack(length)


def take_length(view: View, at: int) -> tuple[int, int]:
    """Read a length, check that at least that many bytes follow, and return the length and the offset after it."""
    length = view[at]
    at += 1
    if length == _LONG:
        length = _LENGTH.unpack_from(view, at)[0]
        at += _LENGTH.size
    if length > len(view) - at:
        raise ValueError(TOO_SHORT)
    return length, at


def take_bytes(view: View, at: int) -> tuple[View, int]:
    """Read a length and that many bytes. Return the bytes, and the offset of the next item."""
    length, at = take_length(view, at)
    return view[at : at + length], at + length


def put_text(parts: Parts, text: str, _depth: int = 0) -> None:
    """Append a str, which may contain lone surrogates."""
    content = text.encode("utf-8", "surrogatepass")
    length = len(content)
    parts.append(_TEXT_HEADS[length] if length < _LONG else head("s", length))
    parts.append(content)


def take_text(view: View, at: int, _depth: int = 0) -> tuple[str, int]:
    """Decode a str that `put_text` encoded; `at` is the offset after the kind byte."""
    length = view[at]
    at += 1
    if length == _LONG or length > len(view) - at:
        length, at = take_length(view, at - 1)
    end = at + length
    return str(view[at:end], "utf-8", "surrogatepass"), end


def _find(kind: type) -> Encoder | None:
    for find in finders:
        encoder = find(kind)
        if encoder is not None:
            return encoder
    return None


def _description(value: object) -> str:
    kind = type(value)
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"the {kind.__name__} {name}"
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
