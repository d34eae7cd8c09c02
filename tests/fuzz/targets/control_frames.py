"""Input of a control connection after the proof: lengths, hashes, contents."""

from __future__ import annotations

from unisono.control.sockets import FrameProtector, InvalidFrameError

REFUSALS = (InvalidFrameError,)
MEMORY = (1 << 18, 20)
KEYS = b"a" * 32, b"b" * 32


def seeds() -> list[bytes]:
    sender = FrameProtector(KEYS[1], KEYS[0])
    whole = [sender.encode(content) for content in (b"", b"x", b"y" * 300)]
    return [b"".join(whole), whole[0], b"".join(whole)[:-5]]


def run(data: bytes) -> None:
    channel = FrameProtector(*KEYS)
    half = len(data) // 2
    for part in (data[:half], data[half:]):
        assert all(content in (b"", b"x", b"y" * 300) for content in channel.decode(part)), "a forged frame was taken"
