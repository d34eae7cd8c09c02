"""How another process of the same user finds the control plane of a running one, by its process number.

A Unix socket in Linux's abstract namespace: it has no file, and goes with its process. Who connects is known to the
kernel, and only the same user (or root) is told anything.
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
    """Tells the address and the secret of a control plane to whoever may know them.

    Args:
        address: Of the control plane.
        secret: Of the control plane.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._card = serialization.encode((*address, secret))
        self._socket = _opened()

    @property
    def socket(self) -> socket.socket | None:
        """What becomes readable when somebody knocks; None where the platform has no such sockets."""
        return self._socket

    def answer(self) -> None:
        """Tell whoever has knocked. Never waits."""
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
                # It has gone again.
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
            # Another handle of this process has this one.
            listener.close()
        else:
            return listener
    return None


def _peer(other: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    raw = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def _is_this_user(other: socket.socket) -> bool:
    return _peer(other)[1] in (0, os.geteuid())


def find_control(pid: int) -> tuple[tuple[str, int], bytes]:
    """Address and secret of the control plane that a process of this host belongs to.

    Raises:
        CommError: There is no such process, it has no part in a job, or belongs to another user.
        UnavailableError: Not on Linux.
    """
    if sys.platform != "linux":
        raise UnavailableError("to ask a running process needs Linux")
    for number in range(_MOST):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_WITHIN_S)
            try:
                line.connect(_name(pid, number))
            except OSError:
                continue
            # Anybody may take a name in this namespace; who has taken it, the kernel knows.
            if _peer(line)[0] == pid and _is_this_user(line):
                return _read(line, pid)
    raise CommError(
        f"process {pid} has no part in a job of unisono that this user may ask (ranks that are threads of one process "
        "have no control plane that others could reach)"
    )


def _read(line: socket.socket, pid: int) -> tuple[tuple[str, int], bytes]:
    data = b""
    while len(data) < _LENGTH.size or len(data) < _LENGTH.size + min(_LENGTH.unpack_from(data)[0], _MAX_BYTES):
        more = line.recv(_MAX_BYTES) if select.select([line], [], [], _WITHIN_S)[0] else b""
        if not more:
            raise CommError(f"process {pid} does not answer: it is stopped, or just ending")
        data += more
    host, port, secret = serialization.decode(data[_LENGTH.size :])
    return (host, port), secret
