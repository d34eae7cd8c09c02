"""Messages of RPC over connections of its own, behind the hash: what a rank that is known may get wrong."""

from __future__ import annotations

import socket
import struct
from typing import Any, cast

from unisono.transports.tcp.mailbox import EnvelopeReader

# Each ends the connection to that rank, which counts as lost.
REFUSALS = (OSError, ValueError, TypeError, RuntimeError, MemoryError, struct.error)
MEMORY = (1 << 19, 20)


class Open:
    """Stand-in for the channel that accepts everything as authentic."""

    def decode(self, data: bytes) -> list[bytes]:
        return [data]


def frame(sizes: list[int], head: bytes, bodies: bytes = b"") -> bytes:
    content = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes) + head
    return struct.pack("<I", len(content)) + content + bodies


def seeds() -> list[bytes]:
    return [frame([], b"hello"), frame([3, 0, 5], b"x", b"abcdefgh"), frame([], b"") * 3]


def run(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(data[:60_000])
        EnvelopeReader(1, ours, cast(Any, Open())).read([])
