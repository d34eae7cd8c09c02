"""Messages between ranks in shared memory: a ring of bytes for each direction of each pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from unisono.core.work import missing_ranks_error
from unisono.transports.shm.barrier import SharedBarrier
from unisono.transports.shm.segment import words_of
from unisono.transports.tagged_messages import TaggedMessages

__all__ = ["MessageRings", "Ring", "nbytes_of", "rings_of"]

_LINE_BYTES = 64
_CONTROL_BYTES = 2 * _LINE_BYTES
_WRITTEN = 0
_READ = _LINE_BYTES // 8


class Ring:
    """One end of a single-producer single-consumer ring; src/native/shm/p2p_ring.hpp has the same protocol.

    Two lines of control hold the counts of bytes written and read since the beginning; each count has one writer,
    and the words order them after the copies that they count.
    Bytes travel in parts, and the last bytes of a part are counted together with padding to the end of their line:
    so each part begins at a line, and both counts are whole lines at any time. Long parts move by quarters of the
    ring, so that both ends copy at the same time.

    Args:
        control: The two lines of control.
        data: The bytes of the ring, a multiple of four lines.
    """

    __slots__ = ("_counts", "_data", "_held")

    def __init__(self, control: memoryview, data: memoryview) -> None:
        self._counts = words_of(control)
        self._data = data
        self._held = 0

    @property
    def available(self) -> int:
        """Bytes that can be read now, with padding."""
        return self._counts[_WRITTEN] - self._counts[_READ]

    @property
    def room(self) -> int:
        """Bytes that can be written now."""
        return len(self._data) - self.available - self._held

    def write(self, content: bytes | memoryview, more: bool = False) -> int:
        """Copy as much of a part as there is room for; return how many bytes that was.

        Args:
            content: The rest of the part.
            more: Whether the next call publishes these bytes together with its own, as `MSG_MORE` of sockets.
        """
        counts = self._counts
        data = self._data
        size = len(data)
        written = counts[_WRITTEN] + self._held
        step = min(len(content), size - written + counts[_READ], size // 4)
        offset = written % size
        first = min(step, size - offset)
        data[offset : offset + first] = content[:first]
        if first < step:
            data[: step - first] = content[first:step]
        written += step
        if step == len(content):
            written += -written % _LINE_BYTES
        if more:
            self._held = written - counts[_WRITTEN]
        else:
            counts[_WRITTEN] = written
            self._held = 0
        return step

    def peek(self) -> memoryview:
        """Return what is available in one piece, whole lines; it stays in the ring."""
        counts = self._counts
        offset = counts[_READ] % len(self._data)
        return self._data[offset : offset + counts[_WRITTEN] - counts[_READ]]

    def skip(self, nbytes: int) -> None:
        """Remove a part of this many bytes from the ring."""
        read = self._counts[_READ] + nbytes
        self._counts[_READ] = read + -read % _LINE_BYTES

    def read(self, into: memoryview) -> int:
        """Copy as much of a part as there is into memory for the rest of it; return how many bytes that was."""
        counts = self._counts
        data = self._data
        size = len(data)
        read = counts[_READ]
        step = min(len(into), counts[_WRITTEN] - read, size // 4)
        offset = read % size
        first = min(step, size - offset)
        into[:first] = data[offset : offset + first]
        if first < step:
            into[first:step] = data[: step - first]
        read += step
        counts[_READ] = read + (-read % _LINE_BYTES if step == len(into) else 0)
        return step


def nbytes_of(size: int, ring_bytes: int) -> int:
    """Memory of the rings of all ordered pairs of `size` ranks."""
    return size * size * (_CONTROL_BYTES + ring_bytes)


def rings_of(rank: int, size: int, memory: memoryview, ring_bytes: int) -> tuple[list[Ring], list[Ring]]:
    """Rings to each rank and from each rank, in memory that holds all control lines, then all data."""
    begin = size * size * _CONTROL_BYTES

    def ring(source: int, target: int) -> Ring:
        pair = source * size + target
        control = pair * _CONTROL_BYTES
        data = begin + pair * ring_bytes
        return Ring(memory[control : control + _CONTROL_BYTES], memory[data : data + ring_bytes])

    return [ring(rank, peer) for peer in range(size)], [ring(peer, rank) for peer in range(size)]


_RING_BYTES = 128 << 10
_SLICE_S = 0.02
"""The longest wait of the native core; after it failures and the deadline are checked."""


class MessageRings(TaggedMessages):
    """Messages in rings. A waiting thread moves them; there is no helper thread.

    Args:
        barrier: For waiting and waking without the core, and for failures.
        memory: The part of the shared memory that holds the rings.
        core: The native core, or None.
    """

    @staticmethod
    def nbytes(size: int) -> int:
        """Memory that the rings of `size` ranks take."""
        return nbytes_of(size, _RING_BYTES)

    def __init__(self, barrier: SharedBarrier, memory: memoryview, core: Any) -> None:
        outgoing, incoming = rings_of(barrier.rank, barrier.size, memory, _RING_BYTES)
        super().__init__(dict(enumerate(outgoing)), dict(enumerate(incoming)), barrier.rank)
        self._barrier = barrier
        self._core = core

    def cause(self) -> BaseException | None:
        return self._barrier.broken

    def wake(self, peer: int) -> None:
        (self._barrier if self._core is None else self._core).wake(peer)

    def wait(self, deadline: float, done: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Wait until messages have moved, or `done` is true.

        Raises as `SharedBarrier.wait_until`.
        """
        if self._core is None:
            self._barrier.wait_until(lambda: self.move() or done(), deadline, missing)
            return
        # Another thread may move the messages that this one waits for: the core counts its steps.
        progress = self._core.progress
        started = time.monotonic()
        if done():
            return
        limit = min(deadline, started + _SLICE_S)
        self._core.wait_for_messages(list(self._sending), list(self._receiving), progress, limit)
        if not self.move() and not done():
            self._barrier.check(lambda: self.move() or done(), missing)
            if time.monotonic() > deadline:
                raise missing_ranks_error(time.monotonic() - started, missing())

    def check(self, done: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Move what can be moved. Raise as `SharedBarrier.check` if the rest cannot complete."""
        if not self.move() and not done():
            self._barrier.check(lambda: self.move() or done(), missing)
