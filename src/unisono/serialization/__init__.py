"""Serialization without pickle: decoding received bytes only creates a value and never runs code."""

from __future__ import annotations

import struct
from typing import Any

# Each of these modules registers its codecs when it is imported.
from unisono.serialization import builtins, classes, tensors  # noqa: F401
from unisono.serialization.classes import register
from unisono.serialization.format import MAX_DEPTH, TOO_SHORT, Buffer, Parts, UnsendableError, finders, read, write

__all__ = ["MAX_DEPTH", "decode", "encode", "register"]

_SMALL = 4096

finders.extend((classes.find, tensors.find))


def encode(value: object) -> bytes:
    """Return bytes from which `decode` creates an equal value.

    Supports None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, OrderedDict,
    slice, range, members of enums, NamedTuples, dataclasses, and torch's tensors, dtypes, devices and sizes. Also
    supports numpy's arrays (not subclasses) and scalars if numpy is already imported. Only the declared fields of a
    dataclass are sent. A received combination of `enum.Flag` members equals the receiver's own combination only if the
    receiver created its own before decoding; otherwise, compare the `value`s, or test whether the received combination
    contains a flag. Combinations of `enum.IntFlag` members compare as usual. A tensor arrives as a contiguous CPU
    tensor without requires_grad.

    Cost: about 0.3 us for a small item; a tensor's bytes are copied once.

    Raises:
        TypeError: Something in the value cannot be sent; the message says what it is and where.
        ValueError: The value nests deeper than `MAX_DEPTH`, or contains itself.

    Example:
        >>> decode(encode(("all_reduce", 17, {"shape": [2, 3]})))
        ('all_reduce', 17, {'shape': [2, 3]})
    """
    parts: Parts = []
    try:
        write(parts, value, MAX_DEPTH)
    except UnsendableError as error:
        path = "value" + "".join(reversed(error.path))
        raise TypeError(
            f"{path} is {error.kind}; send plain values (numbers, strings, containers, dataclasses, tensors) "
            "or pass trusted=True"
        ) from None
    return b"".join(parts)


def decode(data: Buffer) -> Any:
    """Return the value from which `encode` created `data`.

    Classes are looked up by name in modules that are already imported, or among the classes passed to `register`. No
    module is imported, and no constructor, property setter, `__del__` or `_missing_` is run (except setters and
    `__del__` of registered classes). Memory use is at most a small multiple of the input size, and nothing is cached.

    Raises:
        ValueError: The bytes are truncated or damaged, or name a class that this process does not know.

    Example:
        >>> decode(encode("a word")[:-1])
        Traceback (most recent call last):
        ...
        ValueError: these bytes hold no value: they end too early
    """
    # Read small inputs as bytes, because indexing bytes is twice as fast as indexing a memoryview. Read large inputs as
    # a memoryview, because slicing it copies nothing.
    view = data if type(data) is bytes and len(data) < _SMALL else memoryview(data).cast("B")
    try:
        value, end = read(view, 0, MAX_DEPTH)
        if end != len(view):
            raise ValueError(f"{len(view) - end} bytes follow its end")
    except (IndexError, struct.error):
        raise ValueError(f"these bytes hold no value: {TOO_SHORT}") from None
    # Hashing or comparing a decoded value may run code of a user's class, which may raise any exception.
    except Exception as error:
        raise ValueError(f"these bytes hold no value: {error}") from error
    return value
