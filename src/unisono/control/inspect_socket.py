"""Lookup of a running process's control plane by its process id, for other processes of the same user.

A Unix socket in Linux's abstract namespace: it has no file, and disappears with its process. The kernel knows which
user connects; only the same user (or root) gets an answer.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys

from unisono import serialization
from unisono.errors import CommError, UnavailableError

__all__ = ["InspectSocket", "find_control"]

_MOST = 16
_WITHIN_S = 2.0
_MAX_BYTES = 4096
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")


class InspectSocket:
    """Server that sends the address and the secret of a control plane to permitted processes.

    Args:
        address: Address of the control plane.
        secret: Secret of the control plane.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._card = serialization.encode((*address, secret))
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
                    peer.send(_LENGTH.pack(len(self._card)) + self._card)
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
    """Return address and secret of the control plane that a process of this host belongs to.

    Raises:
        CommError: There is no such process, or it takes no part in a job, or it belongs to another user.
        UnavailableError: Not on Linux.
    """
    if sys.platform != "linux":
        raise UnavailableError("querying a running process needs Linux")
    for number in range(_MOST):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_WITHIN_S)
            try:
                line.connect(_name(pid, number))
            except OSError:
                continue
            # Any process may bind a name in this namespace; the kernel knows which one did.
            if _peer(line)[0] == pid and _is_this_user(line):
                return _read(line, pid)
    raise CommError(
        f"process {pid} is in no unisono job that this user may query (ranks that are threads of one process have "
        "no control plane that other processes can reach)"
    )


def _read(line: socket.socket, pid: int) -> tuple[tuple[str, int], bytes]:
    data = b""
    while len(data) < _LENGTH.size or len(data) < _LENGTH.size + min(_LENGTH.unpack_from(data)[0], _MAX_BYTES):
        more = line.recv(_MAX_BYTES) if select.select([line], [], [], _WITHIN_S)[0] else b""
        if not more:
            raise CommError(f"process {pid} does not answer: it is stopped or ending")
        data += more
    host, port, secret = serialization.decode(data[_LENGTH.size :])
    return (host, port), secret
