"""Looks up the control plane of a running process by its process id, for other processes of the same user.

The process listens on a Unix socket in Linux's abstract namespace, which has no file and disappears when the process
ends. The kernel identifies the connecting user; only the same user (or root) gets an answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import sys
from pathlib import Path

from unisono import serialization
from unisono.core.frames import FrameChannel, Kind, within
from unisono.errors import CommError, UnavailableError
from unisono.host.processes import process_stat

__all__ = [
    "InspectSocket",
    "check_linux",
    "find_control",
    "find_jobs",
    "is_this_user",
    "names",
    "opened",
    "path_of",
    "user_of",
]

_MOST = 16
_WITHIN_S = 2.0
_MAX_BYTES = 4096
_KIND = "unisono"
_CREDENTIALS = struct.Struct("3i")


class InspectSocket:
    """Server that sends the address and the secret of a control plane to permitted processes.

    Args:
        address: Address of the control plane.
        secret: Secret of the control plane.

    Attributes:
        socket: Socket that becomes readable when a process connects; None if no socket could be opened (see `opened`).
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._content = serialization.encode((*address, secret))
        self.socket: socket.socket | None = opened(_KIND)

    def answer(self) -> None:
        """Answer a process that has connected. Never waits."""
        assert self.socket is not None
        try:
            peer, _ = self.socket.accept()
        except OSError:
            return
        # The other process may have disconnected already.
        with peer, contextlib.suppress(OSError):
            peer.setblocking(False)
            if is_this_user(peer):
                peer.send(FrameChannel().encode(Kind.ADDRESS, self._content))

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()


def path_of(kind: str, pid: int, number: int) -> str:
    """Return the name of a process's socket in the abstract namespace."""
    return f"\0{kind}/{pid}/{number}"


def opened(kind: str) -> socket.socket | None:
    """Return a new socket that listens on one of this process's names in the abstract namespace.

    Returns None if no name is free, or if the platform is not Linux.
    """
    if sys.platform != "linux":
        return None
    for number in range(_MOST):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path_of(kind, os.getpid(), number))
            listener.listen(4)
            listener.setblocking(False)
        except OSError:
            # Another handle of this process already uses this name.
            listener.close()
        else:
            return listener
    return None


def user_of(other: socket.socket) -> tuple[int, int]:
    """Return the peer's process ID and user ID, as reported by the kernel."""
    raw = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def is_this_user(other: socket.socket) -> bool:
    """Return whether the peer is a process of this user, or of root."""
    return user_of(other)[1] in (0, os.geteuid())


def find_control(pid: int) -> tuple[tuple[str, int], bytes]:
    """Return the address and secret of the control plane used by a process on this host, or by one of its descendants.

    Raises:
        CommError: The process does not exist, is not part of a job, or belongs to another user.
        UnavailableError: The platform is not Linux.
    """
    check_linux()
    own = [(0, pid, number) for number in range(_MOST)]
    # Query the nearest descendants first, because a rank may have started its own job.
    below = [(ancestors.index(pid), *name) for name in names(_KIND) if pid in (ancestors := _ancestors(name[0]))]
    for _, other, number in [*own, *sorted(below)]:
        found = _ask(other, number)
        if found is not None:
            return found
    raise CommError(
        f"process {pid} is in no unisono job that this user may query (ranks that are threads of one process have "
        "no control plane that other processes can reach; a program on torch's own process groups must have been "
        "started under `unisono watch`)"
    )


def find_jobs() -> dict[tuple[tuple[str, int], bytes], list[int]]:
    """Return the control planes of this user's processes on this host, each with the processes that use it.

    Raises:
        UnavailableError: The platform is not Linux.
    """
    check_linux()
    jobs: dict[tuple[tuple[str, int], bytes], list[int]] = {}
    for pid, number in names(_KIND):
        with contextlib.suppress(CommError):
            found = _ask(pid, number)
            if found is not None and pid not in jobs.setdefault(found, []):
                jobs[found].append(pid)
    return jobs


def check_linux() -> None:
    """Raise `UnavailableError` on platforms other than Linux."""
    if sys.platform != "linux":
        raise UnavailableError("querying a running process needs Linux")


def names(kind: str) -> list[tuple[int, int]]:
    """Return the `pid` and `number` (see `path_of`) of every socket of the given kind on this host."""
    listed = {line.rpartition(" ")[2] for line in Path("/proc/net/unix").read_text().splitlines()}
    matches = filter(None, map(re.compile(rf"@{kind}/(\d+)/(\d+)").fullmatch, listed))
    return sorted((int(match[1]), int(match[2])) for match in matches)


def _ancestors(pid: int) -> list[int]:
    """Return a process's parent, grandparent, and so on.

    The parent alone would not lead to the launcher: a rank started through a fork server is the launcher's grandchild.
    """
    parent = int(process_stat(pid)[1])
    found: list[int] = []
    # The host's first process is the ancestor of all processes, so stop before it.
    while parent not in found and (parent > 1 or not found):
        found.append(parent)
        parent = int(process_stat(parent)[1])
    return found


def _ask(pid: int, number: int) -> tuple[tuple[str, int], bytes] | None:
    """Return the answer from a process's socket; None if the socket does not exist or refuses this user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_WITHIN_S)
        try:
            connection.connect(path_of(_KIND, pid, number))
        except OSError:
            return None
        # Any process can bind an abstract socket name, but the kernel knows which process has bound it.
        return _read(connection, pid) if user_of(connection)[0] == pid and is_this_user(connection) else None


def _read(connection: socket.socket, pid: int) -> tuple[tuple[str, int], bytes]:
    try:
        for frame in FrameChannel(most_bytes=_MAX_BYTES).frames(within(connection, _WITHIN_S), Kind.ADDRESS):
            match serialization.decode(frame.content):
                case str(host), int(port), bytes(secret):
                    return (host, port), secret
    # If the process ends before it answers, the connection is reset; another version may answer differently.
    except (OSError, ValueError):
        pass
    raise CommError(f"process {pid} does not answer: it is stopped or ending, or has another version of unisono")
