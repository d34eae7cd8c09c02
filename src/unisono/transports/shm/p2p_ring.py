"""Rings of bytes in shared memory: one for each direction of each pair of ranks."""

from __future__ import annotations

from unisono.transports.shm.segment import words_of

__all__ = ["Ring", "nbytes_of", "rings_of"]

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
