"""file:///path: rank 0 writes its address and a new secret to a file, which the other ranks on the host read."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from unisono.bootstrap.rendezvous import InitRequest, Lease, MovedError, RankClaim, Rendezvous, acquire, confirm, meet
from unisono.control.client import SocketControl
from unisono.control.sockets import refuse_if_shared
from unisono.errors import CommError, CommTimeoutError
from unisono.host.files import write_aside

__all__ = ["RendezvousFile", "address_in", "find", "read"]

_MARK = "unisono meets here"
_MAX_BYTES = 4096
_LOOK_EVERY_S = 0.02
_REACH_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class RendezvousFile:
    """Contents of the rendezvous file."""

    host: str
    port: int
    secret: str
    name: str

    def text(self) -> str:
        return "\n".join((_MARK, self.host, str(self.port), self.secret, self.name, ""))


def find(request: InitRequest) -> Rendezvous:
    """Return the rendezvous, using a file that rank 0 creates, or overwrites if the file is empty or old."""
    path = _path(request.init_method or "")
    rank, size = request.numbers()
    claim = RankClaim(rank, size, None, request.deadline, f"rank {rank} of {size}, rendezvous through {path}")
    return _host(path, claim) if rank == 0 else _follow(path, claim)


def address_in(url: str) -> tuple[tuple[str, int], bytes]:
    """Return the control plane's address and secret from a file."""
    path = _path(url)
    published = read(path)
    if published is None:
        raise CommError(f"{path} describes no job. Is a job running that uses this file?")
    return (published.host, published.port), published.secret.encode()


def _path(url: str) -> Path:
    # File names may contain "#", "?" and even "%20". `Path.as_uri` encodes a space as "%20", so decode the name, unless
    # the decoded name's directory is missing and the undecoded name's directory exists.
    name = url.removeprefix("file://")
    path = Path(unquote(name))
    if not path.parent.is_dir() and Path(name).parent.is_dir():
        path = Path(name)
    if not name.startswith("/"):
        raise ValueError(f"{url!r} names no file; write file:///path/of/a/file, with three slashes")
    if not path.parent.is_dir():
        raise ValueError(f"the directory {path.parent} does not exist; create it first")
    return path


def read(path: Path) -> RendezvousFile | None:
    """Return the file's contents; None if the file is missing or empty."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommError(f"cannot read {path}: {error.strerror or error}; choose another file") from error
    if not text:
        return None
    mark, *lines = text.splitlines()
    if mark != _MARK or len(lines) != 4 or not _is_address(lines[0], lines[1]):
        raise ValueError(f"{path} was not written by unisono and is left unchanged; pass an empty file or a new name")
    refuse_if_shared(path, status, stat.S_IRWXG | stat.S_IRWXO)
    return RendezvousFile(lines[0], int(lines[1]), lines[2], lines[3])


def _is_address(host: str, port: str) -> bool:
    """Return whether the port is from 1 to 65535, and the host consists of 1 to 255 printable ASCII characters."""
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    return 0 < number < 1 << 16 and 0 < len(host) < 256 and host.isascii() and host.isprintable()


# -- rank 0 ----------------------------------------------------------------------------------------
def _host(path: Path, claim: RankClaim) -> Rendezvous:
    old = read(path)
    held = _lease(path, made_by_user=path.exists() and old is None)
    published = RendezvousFile(*held.server.address, held.secret.decode(), socket.gethostname())
    try:
        if published != old:
            write_aside(path, published.text())
    except OSError as error:
        held.release()
        raise CommError(f"cannot write {path}: {error.strerror or error}; choose another file") from error
    try:
        return meet(claim, held.server.address, held.secret, held)
    except CommTimeoutError as error:
        if read(path) is not None:
            error.add_note(f"Another process has written {path} since. Do two processes claim to be rank 0?")
        raise


def _lease(path: Path, *, made_by_user: bool) -> Lease:
    def withdraw() -> None:
        with contextlib.suppress(OSError, ValueError, CommError):
            published = read(path)
            if published is None or published.secret.encode() != held.secret:
                # Another process has overwritten the file, so leave it unchanged.
                return
            if made_by_user:
                path.write_text("")
            else:
                path.unlink()

    held = acquire(f"file://{path}", None, "127.0.0.1", 0, withdraw)
    return held


# -- the other ranks -------------------------------------------------------------------------------
def _follow(path: Path, claim: RankClaim) -> Rendezvous:
    """Try the address in the file repeatedly: if the file is from an earlier run, rank 0 will replace the address."""
    last = "no rank has written it"
    while claim.left_s:
        published = read(path)
        if published is not None and published.name != socket.gethostname():
            last = f"it was written on {published.name}: for ranks of several hosts use tcp://host:port"
        elif published is not None:
            try:
                return _try(path, published, claim)
            except MovedError as error:
                last = f"the address in it does not work: {error}"
        time.sleep(_LOOK_EVERY_S)
    raise CommTimeoutError(
        f"rank 0 was not reached through {path} in time ({last}). Is it running, and does it use the same file?"
    )


def _try(path: Path, published: RendezvousFile, claim: RankClaim) -> Rendezvous:
    patience_s = max(claim.left_s, 1.0)
    reach_within_s = min(max(claim.left_s, 0.1), _REACH_WITHIN_S)
    try:
        control = SocketControl(
            (published.host, published.port),
            published.secret.encode(),
            patience_s,
            reach_within_s=reach_within_s,
            host_rank=0,
        )
    except CommError as error:
        raise MovedError(error.message) from error
    return confirm(claim, control, moved=lambda: read(path) != published)
