"""The connections of a process group of gloo's, found from outside: gloo offers no way to end a wait."""

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
    """Gloo gives each group a port of its own, at which it listens for the connections that peers make.

    To shut down those that were accepted there ends the waits of both sides: of any two ranks, one has accepted.
    But gloo ends the process if a connection breaks off in the moment in which it is made; so what is shut down
    has been seen a look before.
    """

    def __init__(self) -> None:
        self._ports: set[int] = set()
        self._seen: set[int] = set()

    def listening(self, make: Callable[[], T]) -> T:
        """What `make` makes; the ports at which that listens are remembered."""
        before = set(_listening())
        made = make()
        self._ports |= set(_listening()) - before
        return made

    def look(self) -> None:
        """All that is accepted by now is in use."""
        for end in self._accepted():
            self._seen.add(_number(end))

    def shut(self) -> bool:
        """End all that was accepted before the last look; whether there is more. From any thread; again is harmless."""
        fresh = False
        for end in self._accepted():
            if _number(end) in self._seen:
                # One whose other end was reset is at its end already.
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            else:
                fresh = True
                self._seen.add(_number(end))
        return fresh

    def abandon(self, _kept: object, works: Sequence[Any]) -> None:
        """Keep a group of gloo's until its collectives have ended: to let go of it before would stop the process."""
        # What was new at the first look is made by the second. Connections that are made when first used may come only
        # now.
        time.sleep(_LOOK_EVERY_S)
        while self.shut() or not all(work.is_completed() for work in works):
            time.sleep(_LOOK_EVERY_S)

    def _accepted(self) -> Iterator[socket.socket]:
        for end in _sockets() if self._ports else ():
            with suppress(OSError):
                if end.getsockname()[1] in self._ports and not _accepts(end):
                    yield end


def _number(end: socket.socket) -> int:
    """Of a socket, whatever its descriptors are."""
    return os.fstat(end.fileno()).st_ino


def _listening() -> Iterator[int]:
    for end in _sockets():
        with suppress(OSError):
            if _accepts(end):
                yield end.getsockname()[1]


def _accepts(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, each by a descriptor of its own that ends with the loop."""
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
    # Its type is told, with a flag: what is found out would be made non-blocking, for all who use the connection,
    # where the program has set a default timeout.
    with socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, fileno=os.dup(number)) as end:
        yield end
