"""A rank's reports to the monitor, in shared memory: the monitor can still read them when the rank has died."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from unisono.core import clock
from unisono.core.frames import Frame, FrameChannel, InvalidFrameError, Kind, frame_bytes
from unisono.host.anonymous_files import open_file
from unisono.host.native import native

if TYPE_CHECKING:
    from unisono._native import Ring

__all__ = ["REPORT_BYTES", "ReportReader", "ReportWriter"]

_PAGE_BYTES = 4096
_RING_BYTES = 1 << 20
REPORT_BYTES = 2 * _PAGE_BYTES + _RING_BYTES
"""Size of the file for one ring. Its first page is for `create_file`; a ring also needs two counts."""
_MOST_BYTES = 1 << 24


class ReportWriter:
    """The rank's end of a ring. Thread-safe.

    Args:
        handle: Handle of a file of `REPORT_BYTES`; see `create_file`.
        stopped: Function that returns whether the monitor reads no more.

    Raises:
        OSError, ValueError: The file cannot be mapped.
    """

    def __init__(self, handle: bytes, stopped: Callable[[], bool]) -> None:
        self._ring, _ = _ends(handle)
        self._stopped = stopped
        self._channel = FrameChannel(most_bytes=_MOST_BYTES)
        self._lock = threading.Lock()

    def write(self, kind: Kind, content: bytes, within_s: float) -> None:
        """Write a report. If the ring is full, wait until the monitor has read some of it.

        Raises:
            TimeoutError: The monitor has read nothing for so long, or reads no more.
        """
        with self._lock:
            rest = memoryview(self._channel.encode(kind, content))
            while (step := self._ring.write(rest)) < len(rest):
                rest = rest[step:]
                if not step:
                    # The monitor tells nobody that it has read, so poll.
                    clock.poll_until(lambda: self._stopped() or self._ring.room > 0, clock.now() + within_s, spins=1)
                    if not self._ring.room:
                        raise TimeoutError("the monitor does not read")


class ReportReader:
    """The monitor's end of a ring.

    Args:
        handle: Handle of the file, which the rank keeps open until the monitor has mapped it.

    Raises:
        OSError, ValueError: The file cannot be mapped.
    """

    def __init__(self, handle: bytes) -> None:
        _, self._ring = _ends(handle)
        self._channel = FrameChannel(most_bytes=_MOST_BYTES)
        self._frame = bytearray()
        self._missing = 0

    def read(self) -> Iterator[Frame]:
        """Yield the reports that the rank has written. Raises `InvalidFrameError` if it has written other bytes."""
        while self._ring.available:
            if not self._missing:
                # A frame begins at a cache line, so its header does not wrap around at the end of the ring.
                self._missing = frame_bytes(self._ring.peek())
                if self._missing > _MOST_BYTES:
                    raise InvalidFrameError("a report is too long")
                self._frame = bytearray(self._missing)
            self._missing -= self._ring.read(memoryview(self._frame)[-self._missing :])
            if not self._missing:
                self._channel.feed(self._frame)
                frame = self._channel.next(Kind.REQUEST, Kind.CALL)
                assert frame is not None
                yield frame


def _ends(handle: bytes) -> tuple[Ring, Ring]:
    """Map a file, and return both ends of its ring."""
    module = native()
    if module is None:
        raise OSError("there is no native core")
    descriptor, _ = open_file(handle)
    try:
        memory = memoryview(mmap.mmap(descriptor, REPORT_BYTES))
    finally:
        os.close(descriptor)
    # The ring of a rank with itself.
    (outgoing,), (incoming,) = module.rings(memory[_PAGE_BYTES:], 0, 1, _RING_BYTES)
    return outgoing, incoming
