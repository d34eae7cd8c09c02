"""Whole messages in a ring of shared memory: one rank writes, one reads, nobody waits here."""

from __future__ import annotations

import struct
import threading

import torch

from unisono.mailbox import Mail
from unisono.transports._views import view_of

__all__ = ["PAIR_WORDS", "RING_BYTES", "Incoming", "Outgoing", "framed"]

RING_BYTES = 512 << 10
_STEP_BYTES = 128 << 10
"""How much is written or read of a long message before the other end is told: both work at once then."""
_LINE = 8
PAIR_WORDS = 2 * _LINE
"""Of each ring: a line for the writer's count of bytes, and one for the reader's."""
_FIXED = struct.Struct("<II")
_MOST_BODIES = 1 << 16


def framed(head: bytes, lengths: list[int]) -> bytes:
    """What comes before the bodies: how long it is, how many these are, their lengths, the head; and padding."""
    if not lengths:
        return _FIXED.pack(len(head), 0) + head + bytes(-len(head) % 8)
    sizes = struct.pack(f"<{len(lengths)}Q", *lengths)
    return _FIXED.pack(len(sizes) + len(head), len(lengths)) + sizes + head + bytes(-len(head) % 8)


class _Ring:
    """One end of a ring. `base` counts bytes from the start of time; each part begins at a multiple of 8."""

    __slots__ = ("base", "content", "words")

    def __init__(self, words: memoryview, content: memoryview) -> None:
        self.words, self.content = words, content
        self.base = 0


class Outgoing(_Ring):
    """The writer's end. Hold `lock` for the whole of a message."""

    __slots__ = ("lock",)

    def __init__(self, words: memoryview, content: memoryview) -> None:
        super().__init__(words, content)
        self.lock = threading.Lock()

    def put(self, content: bytes | memoryview, most: int = RING_BYTES, padding: int = 0) -> int:
        """Write as much as there is room for; how much that was.

        Args:
            content: What is left to be written.
            most: Bytes to write at once.
            padding: Bytes that are skipped after the last.
        """
        length = min(len(content), self.room, most)
        place = self.base % RING_BYTES
        first = min(length, RING_BYTES - place)
        self.content[place : place + first] = content[:first]
        if first < length:
            self.content[: length - first] = content[first:length]
        self.base += length + (padding if length == len(content) else 0)
        self.words[0] = self.base
        return length

    def put_body(self, content: memoryview, padding: int) -> int:
        """The same, of a long message: a part of it, so that the reader can begin."""
        return self.put(content, _STEP_BYTES, padding)

    @property
    def room(self) -> int:
        """Bytes that can be written now."""
        # Padding is counted where it would not fit, too: nobody writes it.
        return max(RING_BYTES - (self.base - self.words[_LINE]), 0)


class Incoming(_Ring):
    """The reader's end. A long message is taken as it comes, into memory of its own."""

    __slots__ = ("bodies", "gaps", "head", "lengths", "peer", "wanted")

    def __init__(self, words: memoryview, content: memoryview, peer: int) -> None:
        super().__init__(words, content)
        self.peer = peer
        self.head: bytearray | None = None
        self.lengths = self.wanted = 0
        self.bodies: list[torch.Tensor] | None = None
        self.gaps: list[memoryview] = []

    def take(self, mails: list[Mail]) -> None:
        """Read what is there."""
        while (there := self.words[0] - self.base) > 0:
            if self.head is None:
                place = self.base % RING_BYTES
                length, count = _FIXED.unpack_from(self.content, place)
                end = place + _FIXED.size + length
                whole = _FIXED.size + length + -length % 8
                if not count and there >= whole and end <= RING_BYTES:
                    # The usual one: short, whole, and in one piece.
                    mails.append(Mail(self.peer, bytes(self.content[place + _FIXED.size : end]), ()))
                    self._advance(whole)
                    continue
                if count > _MOST_BODIES:
                    raise ValueError(f"rank {self.peer} sent a message with {count} bodies")
                self.head, self.lengths, self.wanted = bytearray(), count, length
                self._advance(_FIXED.size)
            elif self.bodies is None:
                self._take_head(there)
            else:
                self._take_body(there)
            if self.bodies is not None and not self.gaps:
                mails.append(self._whole())

    def _take_head(self, there: int) -> None:
        """Go on with what comes before the bodies; `wanted` is what is missing of it."""
        head, place = self.head, self.base % RING_BYTES
        assert head is not None
        step = min(there, self.wanted, RING_BYTES - place)
        head += self.content[place : place + step]
        self.wanted -= step
        self._advance(step if self.wanted else step + -len(head) % 8)
        if not self.wanted:
            sizes = struct.unpack_from(f"<{self.lengths}Q", head)
            self.bodies = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
            self.gaps = [view_of(body) for body in self.bodies if body.numel()]

    def _take_body(self, there: int) -> None:
        """Go on with the bodies; `gaps` is where the rest of them goes."""
        gap, place = self.gaps[0], self.base % RING_BYTES
        step = min(there, len(gap), RING_BYTES - place, _STEP_BYTES)
        gap[:step] = self.content[place : place + step]
        if step < len(gap):
            self.gaps[0] = gap[step:]
            self._advance(step)
        else:
            self.gaps.pop(0)
            # What a body leaves of its last eight bytes is skipped; it began at a multiple of 8.
            self._advance(step + -(self.base + step) % 8)

    def _whole(self) -> Mail:
        head, bodies = self.head, self.bodies
        assert head is not None
        assert bodies is not None
        self.head = self.bodies = None
        return Mail(self.peer, bytes(memoryview(head)[8 * len(bodies) :]), bodies)

    def _advance(self, length: int) -> None:
        self.base += length
        self.words[_LINE] = self.base
