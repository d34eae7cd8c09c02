"""The header in front of a message of `Checksummed`."""

from __future__ import annotations

import torch

from unisono.core.types import Recv, Send
from unisono.errors import CorruptedError
from unisono.wrappers.checksum import Frame

REFUSALS = (CorruptedError,)
MEMORY = (1 << 18, 40)
CONTENT = torch.arange(16, dtype=torch.uint8)


def seeds() -> list[bytes]:
    frames = [Frame(Send(CONTENT, 1, 0), number) for number in (1, 2)]
    for frame in frames:
        frame.pack()
    return [bytes(frame.packed.tolist()) for frame in frames[:1]] * 2


def run(data: bytes) -> None:
    got = torch.zeros_like(CONTENT)
    frame = Frame(Recv(got, 1, 0), 1)
    size = frame.packed.numel()
    frame.packed.copy_(torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8))
    frame.unpack()
    assert torch.equal(got, CONTENT), "spoilt content was taken"
