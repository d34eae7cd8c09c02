"""Finds and shuts down the sockets of a gloo process group, because gloo itself cannot end a wait."""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

__all__ = ["Sockets"]

T = TypeVar("T")

_LOOK_EVERY_S = 0.02
_LOOK_AGAIN_EVERY_S = 1.0


class Sockets:
    """The sockets that a gloo group has accepted. Each group listens on its own port, which identifies its sockets.

    Every connection was accepted by one of its two ranks; if that rank shuts down the connection, the waits of both
    ranks end. However, gloo aborts the process if a connection breaks while it is being established, so `shut` only
    shuts down connections that an earlier scan has found.
    """

    def __init__(self) -> None:
        self._ports: set[int] = set()
        self._seen: set[int] = set()

    def listening(self, make: Callable[[], T]) -> T:
        """Return the result of `make`, and record the ports on which `make` starts to listen."""
        before = set(_listening())
        made = make()
        self._ports |= set(_listening()) - before
        return made

    def look(self) -> None:
        """Mark all accepted connections as established."""
        self._seen.update(map(_number, self._accepted()))

    def shut(self) -> bool:
        """Shut down the connections that earlier scans found; return whether there are new connections. Idempotent.

        May be called from any thread.
        """
        fresh = False
        for end in self._accepted():
            if _number(end) in self._seen:
                # Shutting down fails if the peer has reset the connection, but a reset connection is already closed.
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            else:
                fresh = True
                self._seen.add(_number(end))
        return fresh

    def abandon(self, _references: object, finished: Sequence[Callable[[], bool]]) -> None:
        """Keep a gloo group alive until its collectives have ended; an earlier release would abort the process."""
        # Wait between scans: a connection that is new in one scan has been established by the next. Scan repeatedly,
        # because gloo may still make connections lazily.
        time.sleep(_LOOK_EVERY_S)
        while (fresh := self.shut()) or not all(is_finished() for is_finished in finished):
            # Without a connection to shut down, a collective ends only at gloo's own timeout, so scan less often.
            time.sleep(_LOOK_EVERY_S if fresh else _LOOK_AGAIN_EVERY_S)

    def _accepted(self) -> Iterator[socket.socket]:
        for end in _sockets() if self._ports else ():
            with suppress(OSError):
                if end.getsockname()[1] in self._ports and not _accepts(end):
                    yield end


def _number(end: socket.socket) -> int:
    """Return a socket's inode number, which is the same for all its descriptors."""
    return os.fstat(end.fileno()).st_ino


def _listening() -> Iterator[int]:
    for end in _sockets():
        with suppress(OSError):
            if _accepts(end):
                yield end.getsockname()[1]


def _accepts(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets, each as a new descriptor that is closed when the iteration continues."""
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
    # Pass SOCK_NONBLOCK in the type. Otherwise, Python would apply the program's default socket timeout, if there is
    # one, which would make the connection non-blocking for all its descriptors.
    with socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, fileno=os.dup(number)) as end:
        yield end
