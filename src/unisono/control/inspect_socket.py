"""Lookup of a running process's control plane by its process id, for other processes of the same user.

A Unix socket in Linux's abstract namespace: it has no file, and disappears with its process. The kernel knows which
user connects; only the same user (or root) gets an answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import struct
import sys
from pathlib import Path

from unisono import serialization
from unisono.errors import CommError, UnavailableError
from unisono.host.processes import process_stat

__all__ = ["InspectSocket", "find_control", "find_jobs"]

_MOST = 16
_WITHIN_S = 2.0
_MAX_BYTES = 4096
_LENGTH = struct.Struct("<I")
_LISTED = re.compile(r"@unisono/(\d+)/(\d+)")
_CREDENTIALS = struct.Struct("3i")


class InspectSocket:
    """Server that sends the address and the secret of a control plane to permitted processes.

    Args:
        address: Address of the control plane.
        secret: Secret of the control plane.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._content = serialization.encode((*address, secret))
        self._socket = _opened()

    @property
    def socket(self) -> socket.socket | None:
        """The socket that becomes readable when a process connects; None where the platform has no such sockets."""
        return self._socket

    def answer(self) -> None:
        """Answer a process that has connected. Never waits."""
        assert self._socket is not None
        try:
            peer, _ = self._socket.accept()
        except OSError:
            return
        with peer:
            peer.setblocking(False)
            try:
                if _is_this_user(peer):
                    peer.send(_LENGTH.pack(len(self._content)) + self._content)
            except OSError:
                # The process has disconnected already.
                return

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _name(pid: int, number: int) -> str:
    return f"\0unisono/{pid}/{number}"


def _opened() -> socket.socket | None:
    if sys.platform != "linux":
        return None
    for number in range(_MOST):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_name(os.getpid(), number))
            listener.listen(4)
            listener.setblocking(False)
        except OSError:
            # Another handle of this process uses this name.
            listener.close()
        else:
            return listener
    return None


def _peer(other: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the peer, as reported by the kernel."""
    raw = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def _is_this_user(other: socket.socket) -> bool:
    return _peer(other)[1] in (0, os.geteuid())


def find_control(pid: int) -> tuple[tuple[str, int], bytes]:
    """Return address and secret of the control plane that a process of this host, or one that it started, belongs to.

    Raises:
        CommError: There is no such process, or it takes no part in a job, or it belongs to another user.
        UnavailableError: Not on Linux.
    """
    _check_platform()
    own = [(pid, number) for number in range(_MOST)]
    for other, number in [*own, *(name for name in _names() if pid in _ancestors(name[0]))]:
        found = _ask(other, number)
        if found is not None:
            return found
    raise CommError(
        f"process {pid} is in no unisono job that this user may query (ranks that are threads of one process have "
        "no control plane that other processes can reach)"
    )


def find_jobs() -> dict[tuple[tuple[str, int], bytes], list[int]]:
    """Return all control planes that processes of this user on this host belong to, and these processes.

    Raises:
        UnavailableError: Not on Linux.
    """
    _check_platform()
    jobs: dict[tuple[tuple[str, int], bytes], list[int]] = {}
    for pid, number in _names():
        with contextlib.suppress(CommError):
            found = _ask(pid, number)
            if found is not None and pid not in jobs.setdefault(found, []):
                jobs[found].append(pid)
    return jobs


def _check_platform() -> None:
    if sys.platform != "linux":
        raise UnavailableError("querying a running process needs Linux")


def _names() -> list[tuple[int, int]]:
    """Return process and number of every such socket of this host, as the kernel lists them."""
    names = {line.rpartition(" ")[2] for line in Path("/proc/net/unix").read_text().splitlines()}
    matches = filter(None, map(_LISTED.fullmatch, names))
    return sorted((int(match[1]), int(match[2])) for match in matches)


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid and pid not in found:
        pid = int(process_stat(pid)[1])
        found.add(pid)
    return found


def _ask(pid: int, number: int) -> tuple[tuple[str, int], bytes] | None:
    """Return what a socket of a process says; None if there is none that may answer this user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_WITHIN_S)
        try:
            connection.connect(_name(pid, number))
        except OSError:
            return None
        # Any process may bind a name in this namespace; the kernel knows which one did.
        return _read(connection, pid) if _peer(connection)[0] == pid and _is_this_user(connection) else None


def _read(connection: socket.socket, pid: int) -> tuple[tuple[str, int], bytes]:
    data = b""
    while len(data) < _LENGTH.size or len(data) < _LENGTH.size + min(_LENGTH.unpack_from(data)[0], _MAX_BYTES):
        more = b""
        # One that ends before it has answered resets the connection.
        with contextlib.suppress(ConnectionResetError):
            if select.select([connection], [], [], _WITHIN_S)[0]:
                more = connection.recv(_MAX_BYTES)
        if not more:
            raise CommError(f"process {pid} does not answer: it is stopped or ending")
        data += more
    host, port, secret = serialization.decode(data[_LENGTH.size :])
    return (host, port), secret
