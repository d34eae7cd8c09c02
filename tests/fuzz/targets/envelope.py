"""Messages of RPC over any transport: the envelope that comes first."""

from __future__ import annotations

import struct

import torch

from unisono.comm.mailbox import ENVELOPE_BYTES, IncomingStream
from unisono.errors import CommError

# Each ends the way to that rank, which counts as lost.
REFUSALS = (CommError, TypeError, RuntimeError, MemoryError, struct.error)
MEMORY = (1 << 19, 20)


def seeds() -> list[bytes]:
    return [
        struct.pack("<II", 5, 0) + b"hello",
        struct.pack("<II3Q", 2, 3, 1, 0, 7) + b"xx",
        struct.pack("<II", 5000, 0),
    ]


def run(data: bytes) -> None:
    incoming = IncomingStream(1)
    content = bytearray(data[:ENVELOPE_BYTES].ljust(ENVELOPE_BYTES, b"\0"))
    incoming.envelope = torch.frombuffer(content, dtype=torch.uint8)
    incoming.arrived()
