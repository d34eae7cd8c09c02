"""Finds the connections of a gloo process group from outside, because gloo cannot end a wait."""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Sockets"]

T = TypeVar("T")

_LOOK_EVERY_S = 0.02


class Sockets:
    """Accepted sockets of a gloo group. Each group listens on its own port for the connections of peers.

    Shutting down the accepted connections ends the waits on both sides: of any two ranks, one has accepted. But gloo
    aborts the process if a connection breaks while it is being established, so only connections seen in an earlier scan
    are shut down.
    """

    def __init__(self) -> None:
        self._ports: set[int] = set()
        self._seen: set[int] = set()

    def listening(self, make: Callable[[], T]) -> T:
        """Return the result of `make`, and record the ports that it listens on."""
        before = set(_listening())
        made = make()
        self._ports |= set(_listening()) - before
        return made

    def look(self) -> None:
        """Mark all connections accepted by now as in use."""
        for end in self._accepted():
            self._seen.add(_number(end))

    def shut(self) -> bool:
        """Shut down all connections seen before; return whether there are new ones. From any thread. Idempotent."""
        fresh = False
        for end in self._accepted():
            if _number(end) in self._seen:
                # A connection reset by its other end is already closed.
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            else:
                fresh = True
                self._seen.add(_number(end))
        return fresh

    def abandon(self, _references: object, works: Sequence[Any]) -> None:
        """Keep a gloo group alive until its collectives have ended: releasing it earlier would abort the process."""
        # A connection that is new in the first scan is established by the second. Connections made on first use may
        # appear only now.
        time.sleep(_LOOK_EVERY_S)
        while self.shut() or not all(work.is_completed() for work in works):
            time.sleep(_LOOK_EVERY_S)

    def _accepted(self) -> Iterator[socket.socket]:
        for end in _sockets() if self._ports else ():
            with suppress(OSError):
                if end.getsockname()[1] in self._ports and not _accepts(end):
                    yield end


def _number(end: socket.socket) -> int:
    """Return the inode of a socket, the same for all its descriptors."""
    return os.fstat(end.fileno()).st_ino


def _listening() -> Iterator[int]:
    for end in _sockets():
        with suppress(OSError):
            if _accepts(end):
                yield end.getsockname()[1]


def _accepts(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets, each as a new descriptor that is closed with the loop."""
    if sys.platform != "linux":
        return
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), _copy(int(path.name)) as end:
            if end is None or end.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM:
                yield end


@contextmanager
def _copy(number: int) -> Iterator[socket.socket | None]:
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        yield None
        return
    # The type is passed with SOCK_NONBLOCK: with a detected type, a default timeout set by the program would make the
    # connection non-blocking for all its users.
    with socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, fileno=os.dup(number)) as end:
        yield end
