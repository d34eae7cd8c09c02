"""Gloo's connections are found among the process's own, all of which stay as they are."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from unisono.transports._torch_sockets import Sockets


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed on Linux alone")
def test_looking_at_connections_changes_none() -> None:
    def listen() -> socket.socket:
        return socket.create_server(("127.0.0.1", 0))

    before = socket.getdefaulttimeout()
    # Python makes each socket that it wraps non-blocking then, for whoever else uses the connection too.
    socket.setdefaulttimeout(5.0)
    try:
        sockets = Sockets()
        with sockets.listening(listen) as server:
            server.settimeout(None)
            with socket.create_connection(server.getsockname()) as client:
                client.settimeout(None)
                accepted, _ = server.accept()
                with accepted:
                    accepted.settimeout(None)
                    sockets.look()
                    assert [os.get_blocking(end.fileno()) for end in (server, client, accepted)] == [True] * 3
                    client.sendall(b"before")
                    assert accepted.recv(6) == b"before"
                    assert not sockets.shut()
                    assert client.recv(1) == b""
    finally:
        socket.setdefaulttimeout(before)
