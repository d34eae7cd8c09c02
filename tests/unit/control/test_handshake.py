"""Connecting to a server that ends meanwhile."""

from __future__ import annotations

import socket
import struct

import pytest

from unisono.control.handshake import dial

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def test_connection_that_is_reset_at_once_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection
    connected: list[socket.socket] = []

    def connect_and_lose(address: tuple[str, int], timeout: float) -> socket.socket:
        peer = connect(address, timeout)
        connected.append(peer)
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        accepted.close()
        with pytest.raises(ConnectionResetError):
            peer.recv(1)
        return peer

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(socket, "create_connection", connect_and_lose)
        with pytest.raises(OSError, match="not connected"):
            dial(listener.getsockname(), 5.0)
    assert connected[0].fileno() == -1
