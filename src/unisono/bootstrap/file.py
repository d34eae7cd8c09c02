"""file:///path: rank 0 writes where it listens, and a fresh secret, to a file that all ranks of one host see."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from unisono.bootstrap.hosting import Lease, lease
from unisono.bootstrap.meeting import MovedError, Seat, meet
from unisono.bootstrap.place import Place, Request
from unisono.control.secret import refuse_if_shared
from unisono.errors import CommError, CommTimeoutError, MismatchError

__all__ = ["find"]

_MARK = "unisono meets here"
_LOOK_EVERY_S = 0.02
_REACH_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class _Note:
    """What the file says."""

    host: str
    port: int
    secret: str
    name: str

    def text(self) -> str:
        return "\n".join((_MARK, self.host, str(self.port), self.secret, self.name, ""))


def find(request: Request) -> Place:
    """The place that the file tells. It is made if it is not there, and taken over if it is empty or old."""
    path = _path(request.init_method or "")
    rank, size = request.numbers()
    seat = Seat(rank, size, None, request.deadline, f"rank {rank} of {size}, met by {path}")
    return _host(path, seat) if rank == 0 else _follow(path, seat)


def _path(url: str) -> Path:
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute():
        raise ValueError(f"{url!r} names no file; write file:///path/of/a/file, with three slashes")
    if not path.parent.is_dir():
        raise ValueError(f"there is no directory {path.parent}; make it first")
    return path


# -- rank 0 ----------------------------------------------------------------------------------------
def _host(path: Path, seat: Seat) -> Place:
    _read(path)
    adopted = path.exists()
    held = _lease(path, adopted)
    note = _Note(*held.server.address, held.secret.decode(), socket.gethostname())
    try:
        _write(path, note.text())
    except OSError as error:
        held.release()
        raise CommError(f"cannot write {path}: {error.strerror or error}; choose a file that can be written") from error
    return meet(seat, held.server.address, held.secret, held)


def _lease(path: Path, adopted: bool) -> Lease:
    def withdraw() -> None:
        # A file that the user made stays, empty; one of ours goes.
        with contextlib.suppress(OSError):
            path.write_text("") if adopted else path.unlink()

    return lease(f"file://{path}", secrets.token_hex(32).encode(), "127.0.0.1", 0, withdraw, keep_secret=True)


def _write(path: Path, text: str) -> None:
    """All at once: nobody ever reads a part of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


# -- the others ------------------------------------------------------------------------------------
def _follow(path: Path, seat: Seat) -> Place:
    last = "nobody has written it"
    while seat.left_s:
        note = _read(path)
        if note is not None:
            try:
                address, secret = (note.host, note.port), note.secret.encode()
                return meet(seat, address, secret, None, lambda: _read(path) != note, _REACH_WITHIN_S)  # noqa: B023
            except MovedError:
                continue
