"""Digests: xxh3 of 128 bits, which notices damage at the speed of memory. It is no proof against forgery."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import xxhash

__all__ = ["ALGORITHM", "BLOCK", "CHUNK", "blocks", "digest", "hasher"]

ALGORITHM = "xxh3-128"
BLOCK = 4 << 20
"""Bytes of a tensor that share a digest: what one rank reads and checks at a time."""
CHUNK = 1 << 19
"""Bytes that are hashed and copied at a time, so that the second finds them in the cache."""


def hasher() -> Any:
    """Something with `update` and `hexdigest`."""
    return xxhash.xxh3_128()


def digest(data: Any) -> str:
    """Digest of all bytes of a buffer: 32 hexadecimal digits.

    Example:
        >>> digest(b"unisono")
        'd3d84b12d90a590aa13098ab94976dfb'
    """
    return str(xxhash.xxh3_128_hexdigest(data))


def blocks(start: int, stop: int, most: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Cut a range into pieces of at most so many bytes.

    Example:
        >>> list(blocks(10, 15, 2))
        [(10, 12), (12, 14), (14, 15)]
    """
    for low in range(start, stop, most):
        yield low, min(low + most, stop)
