"""Messages between two ranks in shared memory: a ring of bytes for each direction of each pair."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from unisono.errors import CommError
from unisono.transports._shm_board import Board
from unisono.transports._shm_marks import DTYPE_CODES, DTYPES
from unisono.types import Message, Recv, Send
from unisono.work import Countdown, elements, misfit

__all__ = ["RING_BYTES", "Rings"]

ItemT = TypeVar("ItemT")

RING_BYTES = 128 << 10
_LINE_BYTES = 64
_CONTROL_BYTES = 2 * _LINE_BYTES
"""Of each ring: a line for the writer's count of bytes, and one for the reader's."""


class _Outgoing:
    """Messages on their way to one peer; only the first is being written."""

    def __init__(self, words: memoryview, data: torch.Tensor) -> None:
        self.words, self.data = words, data
        self.queue: deque[tuple[Send, torch.Tensor, Countdown]] = deque()
        self.sent = -1

    @property
    def written(self) -> int:
        """Bytes since the start of time; the native core counts in the same word."""
        return self.words[0]

    def move(self) -> bool:
        """Write as much as there is room for; whether anything was."""
        moved = False
        while self.queue:
            message, content, work = self.queue[0]
            room = RING_BYTES - (self.written - self.words[8])
            if self.sent < 0:
                if room < _LINE_BYTES:
                    return moved
                self._head(message)
                moved = True
                continue
            left = content.numel() - self.sent
            place = self.written % RING_BYTES
            step = min(left, room, RING_BYTES - place)
            if left and not step:
                return moved
            if left:
                self.data[place : place + step].copy_(content[self.sent : self.sent + step])
                self.sent += step
                self._advance(step if self.sent < content.numel() else _padded(step, self.sent))
                moved = True
            if self.sent == content.numel():
                self.queue.popleft()
                self.sent = -1
                work.arrived(message)
        return moved

    def _head(self, message: Send) -> None:
        place = self.written % RING_BYTES
        words = [message.tag, message.tensor.numel(), DTYPE_CODES[message.tensor.dtype]]
        header = torch.tensor(words, dtype=torch.int64, device="cpu")
        self.data[place : place + 24].copy_(header.view(torch.uint8))
        self.sent = 0
        self._advance(_LINE_BYTES)

    def _advance(self, step: int) -> None:
        self.words[0] += step


def _padded(step: int, total: int) -> int:
    """The last step of a message, with what fills its last line."""
    return step + -total % _LINE_BYTES


class _Incoming:
    """Messages on their way from one peer, and the receives that wait for them, by tag."""

    def __init__(self, words: memoryview, data: torch.Tensor, peer: int, rank: int) -> None:
        self.words, self.data, self.peer, self.rank = words, data, peer, rank
        self.posted: defaultdict[int, deque[tuple[Recv, Countdown]]] = defaultdict(deque)
        self.early: defaultdict[int, deque[tuple[torch.Tensor, str]]] = defaultdict(deque)
        self._target: torch.Tensor | None = None
        self._taken = 0
        self._end: tuple[Recv, Countdown] | None = None
        self._aside: tuple[int, str] | None = None
        self._sought: int | None = None

    @property
    def read(self) -> int:
        """As `_Outgoing.written`."""
        return self.words[8]

    def post(self, message: Recv, work: Countdown) -> None:
        early = _next(self.early, message.tag)
        if early is not None:
            content, sent = early
            if self._fits(message, work, sent):
                message.tensor.view(torch.uint8).copy_(content)
                work.arrived(message)
        else:
            self.posted[message.tag].append((message, work))

    def move(self) -> bool:
        """Take what has come, as far as somebody waits for it; whether anything was."""
        moved = False
        while self.words[0] > self.read:
            if self._target is None and not self._begin():
                return moved
            moved = True
            assert self._target is not None
            left = self._target.numel() - self._taken
            place = self.read % RING_BYTES
            step = min(left, self.words[0] - self.read, RING_BYTES - place)
            if step:
                self._target[self._taken : self._taken + step].copy_(self.data[place : place + step])
                self._taken += step
                self._advance(step if step < left else _padded(step, self._taken))
            if self._taken == self._target.numel():
                self._finish()
        return moved

    def _begin(self) -> bool:
        """Read a header, and choose where the message goes; False if it must wait in the ring."""
        tag, numel, dtype = self._header()
        waiting = _next(self.posted, tag)
        if waiting is not None:
            message, work = waiting
            if self._fits(message, work, elements(numel, str(dtype))):
                self._target, self._end = message.tensor.view(torch.uint8), (message, work)
            else:
                self._target = torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device="cpu")
        elif self.posted or self._sought not in (None, tag):
            # A later message of another tag is waited for, or looked for: this one has to step aside.
            self._target = torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device="cpu")
            self._aside = (tag, elements(numel, str(dtype)))
        else:
            return False
        self._taken = 0
        self._advance(_LINE_BYTES)
        return True

    def _header(self) -> tuple[int, int, torch.dtype]:
        """Of the next message."""
        place = self.read % RING_BYTES
        tag, numel, code = self.data[place : place + 24].view(torch.int64).tolist()
        return tag, numel, DTYPES[code - 1]

    def _finish(self) -> None:
        end, aside, content = self._end, self._aside, self._target
        self._target = self._end = self._aside = None
        if end is not None:
            end[1].arrived(end[0])
        if aside is not None:
            assert content is not None
            self.early[aside[0]].append((content, aside[1]))
            waiting = _next(self.posted, aside[0])
            if waiting is not None:
                self.post(*waiting)

    def _fits(self, message: Recv, work: Countdown, sent: str) -> bool:
        expected = elements(message.tensor.numel(), str(message.tensor.dtype))
        if sent != expected:
            work.complete(misfit(self.peer, sent, self.rank, expected, message.tag, self.peer))
        return sent == expected

    def holds(self, tag: int, move: Callable[[], object]) -> bool:
        """Whether, once all has moved, a message of a tag is here that no receive waits for."""
        self._sought = tag
        move()
        self._sought = None
        waits = self._target is None and self.words[0] > self.read
        return tag in self.early or (waits and self._header()[0] == tag)

    @property
    def idle(self) -> bool:
        """Whether no receive has been posted, and no message is being read."""
        return self._target is None and not self.posted

    def works(self) -> list[Countdown]:
        """Of the receives that are not done."""
        waiting = [work for queue in self.posted.values() for _, work in queue]
        return waiting + ([self._end[1]] if self._end is not None else [])

    def _advance(self, step: int) -> None:
        self.words[8] += step


def _next(queues: dict[int, deque[ItemT]], tag: int) -> ItemT | None:
    """Take out the first of a tag. An empty queue goes: a program may use each tag once."""
    queue = queues.get(tag)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first


class Rings:
    """All messages of one rank. Whoever waits moves everybody's bytes along; nobody else does.

    Args:
        board: For waiting and waking.
        words, data: The part of the shared memory that holds the rings, as 64-bit words and as bytes.

    Attributes:
        early: For each peer, by tag, the messages that have been taken out of its ring, and wait for a receive.
        lock: Held while bytes are moved.
        idle: Whether nothing is under way here, so that the native core may move the next message by itself.
        held: Whether it is doing so.
    """

    @staticmethod
    def nbytes(size: int) -> int:
        """Memory that the rings of `size` ranks take."""
        return size * size * (_CONTROL_BYTES + RING_BYTES)

    def __init__(self, board: Board, words: memoryview, data: torch.Tensor) -> None:
        self._board, self.lock, self.idle, self.held = board, threading.RLock(), True, False
        size, rank = board.size, board.rank
        controls = size * size * _CONTROL_BYTES
        self._out: dict[int, _Outgoing] = {}
        self._in: dict[int, _Incoming] = {}
        for peer in range(size):
            for table, pair in ((self._out, rank * size + peer), (self._in, peer * size + rank)):
                control = words[pair * _CONTROL_BYTES // 8 : (pair + 1) * _CONTROL_BYTES // 8]
                ring = data[controls + pair * RING_BYTES : controls + (pair + 1) * RING_BYTES]
                if table is self._out:
                    self._out[peer] = _Outgoing(control, ring)
                else:
                    self._in[peer] = _Incoming(control, ring, peer, rank)

        self.early = {peer: into.early for peer, into in self._in.items()}

    def post(self, batch: Sequence[Message], work: Countdown) -> None:
        with self.lock:
            if self.held:
                raise CommError("a message was begun inside another one, as by a signal handler")
            self.idle = False
            for message in batch:
                if isinstance(message, Send):
                    content = message.tensor.view(torch.uint8)
                    self._out[message.peer].queue.append((message, content, work))
                else:
                    self._in[message.peer].post(message, work)
            self.move({m.peer for m in batch})

    def pending(self) -> list[Countdown]:
        """The works that are not done."""
        with self.lock:
            sends = [work for out in self._out.values() for _, _, work in out.queue]
            return sends + [work for into in self._in.values() for work in into.works()]

    def holds(self, peer: int, tag: int) -> bool:
        """Move what can be moved; whether a message of a tag from a rank is here that no receive waits for."""
        with self.lock:
            return self._in[peer].holds(tag, self.move)

    def move(self, peers: Sequence[int] | set[int] | None = None) -> bool:
        """Move what can be moved; whether anything was."""
        moved = False
        with self.lock:
            for peer in self._out if peers is None else peers:
                if (self._out[peer].queue and self._out[peer].move()) or self._in[peer].move():
                    moved = True
                    self._board.ring(peer)
            if not self.idle:
                self.idle = not any(out.queue for out in self._out.values()) and all(
                    into.idle for into in self._in.values()
                )
        return moved
