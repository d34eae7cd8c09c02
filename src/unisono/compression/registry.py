"""Codecs by name: a file of `codecs`, an entry point `unisono.compression.codecs`, or what was registered."""

from __future__ import annotations

from collections.abc import Callable

from unisono.compression.codec import Codec
from unisono.core.registry import Registry

__all__ = ["CODECS", "Spec", "resolve"]

CODECS: Registry[Callable[..., Codec]] = Registry("codec", "unisono.compression.codecs", "CODEC")
"""All codecs: `CODECS["int8"]` is a class."""

Spec = Codec | Callable[[], Codec] | str
"""Types that specify a codec."""


def resolve(spec: Spec) -> Codec:
    """Return the codec that `spec` specifies.

    Args:
        spec: A codec, which is returned itself; a class or function without arguments that returns a codec; or a
            name of `CODECS`.

    Raises:
        ValueError: There is no codec of that name.
        TypeError: `spec`, or its result, is no codec.

    Example:
        >>> un.compression.resolve("int8"), un.compression.resolve(un.compression.int8)
        (int8(block=1024), int8(block=1024))
        >>> un.compression.resolve("int4")
        Traceback (most recent call last):
        ...
        ValueError: unknown codec 'int4'; known: ...
    """
    made = CODECS[spec]() if isinstance(spec, str) else spec
    if not isinstance(made, Codec) and callable(made):
        made = made()
    if not isinstance(made, Codec):
        raise TypeError(
            f"a codec, a function that makes one, or one of {', '.join(CODECS.names())} is needed, not {spec!r}"
        )
    return made
