"""The one framing of all connections between processes: heads, hashes, contents, and bytes between frames."""

from __future__ import annotations

from unisono.core.frames import Frame, FrameChannel, InvalidFrameError, Kind

REFUSALS = (InvalidFrameError, ConnectionError)
MEMORY = (1 << 18, 20)
# With keys where others can write, without where they cannot: the first byte says which.
KEYS = [(b"a" * 32, b"b" * 32), (b"", b"")]
MOST_BYTES = 1 << 16
# One kind does not belong here.
WANTED = tuple(kind for kind in Kind if kind != Kind.HELLO)
SENT = [Frame(Kind.REQUEST, 0, b""), Frame(Kind.OUT, -1, b"x"), Frame(Kind.MAIL, 7, b"y" * 300)]


def seeds() -> list[bytes]:
    found = []
    for first, keys in enumerate(KEYS):
        sender = FrameChannel(*keys[::-1])
        whole = [sender.encode(frame.kind, frame.content, frame.number) for frame in SENT]
        found += [bytes([first]) + b"".join(whole[:count]) for count in (1, 3)]
    return found


def run(data: bytes) -> None:
    keys = KEYS[sum(data[:1]) % 2]
    half = len(data) // 2
    parts = iter((data[1:half], data[max(1, half) :], b""))
    taken = []
    channel = FrameChannel(*keys, most_bytes=MOST_BYTES)
    try:
        while (frame := channel.receive(lambda: next(parts, b""), *WANTED)) is not None:
            taken.append(frame)
    finally:
        # Whatever was changed: those that came were sent, with this kind and number, in this order.
        if keys[0]:
            assert taken == SENT[: len(taken)], "a forged frame was taken"
        assert channel.take(memoryview(bytearray(len(data)))) <= len(data)
