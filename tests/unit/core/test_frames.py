"""Frames: only what the peer has sent comes out, once, in order; everything else ends the stream."""

from __future__ import annotations

import socket
from itertools import chain

import pytest

from unisono.core.frames import HEAD_BYTES, Frame, FrameChannel, InvalidFrameError, Kind, within

KEYS = b"a" * 32, b"b" * 32


def sent(*contents: bytes) -> list[bytes]:
    sender = FrameChannel(*KEYS[::-1])
    return [sender.encode(Kind.REQUEST, content, number) for number, content in enumerate(contents)]


def received(*parts: bytes, most_bytes: int = 1000) -> list[Frame]:
    rest = chain(parts, [b""])
    return [*FrameChannel(*KEYS, most_bytes=most_bytes).frames(lambda: next(rest), Kind.REQUEST)]


def test_frames_arrive_in_any_pieces() -> None:
    whole = b"".join(sent(b"", b"one", b"two"))
    expected = [Frame(Kind.REQUEST, 0, b""), Frame(Kind.REQUEST, 1, b"one"), Frame(Kind.REQUEST, 2, b"two")]
    assert received(whole) == expected
    assert received(*(bytes([byte]) for byte in whole)) == expected


def test_every_byte_of_a_frame_is_covered() -> None:
    (frame,) = sent(b"some content")
    for place in range(len(frame)):
        changed = bytearray(frame)
        changed[place] ^= 1
        with pytest.raises((InvalidFrameError, ConnectionError)):
            received(bytes(changed))


@pytest.mark.parametrize("order", [[0, 0], [1], [1, 0], [0, 2]], ids=["repeated", "first lost", "moved", "lost"])
def test_frames_have_a_place(order: list[int]) -> None:
    frames = sent(b"zero", b"one", b"two")
    with pytest.raises(InvalidFrameError, match="not authentic"):
        received(*(frames[number] for number in order))


def test_a_frame_is_refused_at_its_head() -> None:
    (long,) = sent(bytes(1001))
    with pytest.raises(InvalidFrameError, match="too long"):
        received(long[:HEAD_BYTES])
    with pytest.raises(InvalidFrameError, match="kind 5 does not belong here"):
        received(FrameChannel(*KEYS[::-1]).encode(Kind.NEWS, bytes(100))[:HEAD_BYTES])
    with pytest.raises(ValueError, match="1001 bytes are too many for one message; at most 1000"):
        FrameChannel(most_bytes=1000).encode(Kind.NEWS, bytes(1001))


def test_a_stream_that_ends_within_a_frame_is_no_end() -> None:
    (frame,) = sent(b"content")
    assert received() == []
    for length in (1, HEAD_BYTES, len(frame) - 1):
        with pytest.raises(ConnectionError):
            received(frame[:length])


def test_what_others_print_between_frames_is_found_without_keys() -> None:
    ours, theirs = FrameChannel(), FrameChannel()
    ours.feed(theirs.encode(Kind.OUT, b"x") + b"\0" * 20 + theirs.encode(Kind.OUT, b"y"))
    assert ours.next(Kind.OUT) == Frame(Kind.OUT, 0, b"x")
    with pytest.raises(InvalidFrameError):
        ours.next(Kind.OUT)


def test_bytes_between_frames() -> None:
    ours, theirs = FrameChannel(), FrameChannel()
    ours.feed(theirs.encode(Kind.MAIL, b"x") + b"body" + theirs.encode(Kind.MAIL, b"y"))
    assert ours.next(Kind.MAIL) == Frame(Kind.MAIL, 0, b"x")
    body = bytearray(4)
    assert ours.take(memoryview(body)[:3]) == 3
    assert ours.take(memoryview(body)[3:]) == 1
    assert body == b"body"
    assert ours.next(Kind.MAIL) == Frame(Kind.MAIL, 0, b"y")
    assert ours.take(memoryview(body)) == 0


def test_json_that_nests_deep_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nests too deep"):
        Frame(Kind.NEWS, 0, b"[" * 100_000).json()


def test_time_to_read_is_not_extended_by_bytes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x")
        assert within(ours, 10.0)() == b"x"
        theirs.sendall(b"x")
        with pytest.raises(TimeoutError):
            within(ours, 0.0)()
