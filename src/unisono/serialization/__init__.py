"""Serialization without pickle: received bytes can only become a value; they can never run code."""

from __future__ import annotations

import struct
from typing import Any

from unisono.serialization import builtins, classes, tensors
from unisono.serialization.classes import register
from unisono.serialization.format import MAX_DEPTH, TOO_SHORT, Buffer, Parts, UnsendableError, finders, read, write

__all__ = ["MAX_DEPTH", "decode", "encode", "register"]

_SMALL = 4096

builtins.install()
classes.install()
tensors.install()
finders.extend((classes.find, tensors.find))


def encode(value: object) -> bytes:
    """Return bytes from which `decode` creates an equal value.

    Supports None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict,
    OrderedDict, slice, range, members of enums, NamedTuples, dataclasses, and torch's tensors, dtypes,
    devices and sizes; numpy's arrays (not subclasses) and scalars if numpy is already imported. Of a dataclass, only
    the declared fields are sent. A received combination of flags that the receiver has not created itself equals no
    other, unless it is an `IntFlag`: compare its `value`, or test whether it contains a flag. A tensor arrives on the
    CPU, contiguous, without requires_grad.

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
    """Return the value from which `encode` created these bytes.

    Classes are looked up by name in modules that are already imported, or among those passed to `register`. No module
    is imported, and no constructor, property setter, `__del__` or `_missing_` is run (except setters and `__del__` of
    registered classes). Memory is bounded by a small multiple of the input, and nothing is cached.

    Raises:
        ValueError: The bytes are truncated or damaged, or name a class that is not known here.

    Example:
        >>> decode(encode("a word")[:-1])
        Traceback (most recent call last):
        ...
        ValueError: these bytes hold no value: they end too early
    """
    # Indexing bytes is twice as fast as indexing a view; slicing a view copies nothing.
    view = data if type(data) is bytes and len(data) < _SMALL else memoryview(data).cast("B")
    try:
        value, end = read(view, 0, MAX_DEPTH)
        if end != len(view):
            raise ValueError(f"{len(view) - end} bytes follow its end")
    except (IndexError, struct.error):
        raise ValueError(f"these bytes hold no value: {TOO_SHORT}") from None
    # Hashing or comparing may run the code of a user's class, which may raise any exception.
    except Exception as error:
        raise ValueError(f"these bytes hold no value: {error}") from error
    return value
