"""Wire format of mailbox messages, the same on every transport.

A message begins with the length of the head, the number of bodies, and the length of each body; then the head follows.
The bodies are sent separately.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from unisono.core.transport import Envelope

__all__ = ["pack", "parse"]

_HEADER = struct.Struct("<II")
_LENGTH_BYTES = 8
_MOST_HEAD = (1 << 32) - 1
_MOST_BODIES = 1 << 16


def pack(head: bytes, bodies: Sequence[torch.Tensor]) -> bytes:
    """Return the bytes to send before the bodies.

    Raises:
        ValueError: The head is too long, or there are too many bodies.
    """
    if len(head) > _MOST_HEAD or len(bodies) > _MOST_BODIES:
        raise ValueError(
            f"a message has a head of {len(head)} bytes and {len(bodies)} bodies; at most {_MOST_HEAD} and "
            f"{_MOST_BODIES} are allowed"
        )
    lengths = struct.pack(f"<{len(bodies)}Q", *[body.numel() for body in bodies]) if bodies else b""
    return _HEADER.pack(len(head), len(bodies)) + lengths + head


def parse(peer: int, data: bytes | bytearray | memoryview) -> tuple[Envelope | None, int]:
    """Return a message whose newly allocated bodies have yet to be filled, and the number of bytes before the bodies.

    Args:
        peer: Rank of the sender.
        data: Bytes received so far, from the beginning of the message. If the bodies' sizes or the head are
            incomplete, no message is returned.

    Raises:
        ValueError: The message is invalid, or there is not enough memory for it.
    """
    try:
        length, count = _HEADER.unpack_from(data)
    except struct.error:
        raise ValueError(f"a message of {len(data)} bytes is too short") from None
    if count > _MOST_BODIES:
        raise ValueError(f"a message has {count} bodies, which no rank sends")
    begin = _HEADER.size + _LENGTH_BYTES * count
    end = begin + length
    if len(data) < end:
        return None, end
    # Skip the allocation for most messages, which have no bodies.
    bodies = _allocate(struct.unpack_from(f"<{count}Q", data, _HEADER.size)) if count else ()
    return Envelope(peer, bytes(data[begin:end]), bodies), end


def _allocate(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    try:
        return [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]
    # A size beyond int64 raises a TypeError or a RuntimeError, depending on the version of torch.
    except (RuntimeError, MemoryError, TypeError, OverflowError) as error:
        raise ValueError(f"no memory for the bodies of a message, {sum(lengths)} bytes") from error
