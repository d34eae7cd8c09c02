"""Gloo's connections are found among the process's own, all of which stay as they are."""

from __future__ import annotations

import os
import socket
import struct
import sys

import pytest

from unisono.transports.torch.gloo_sockets import Sockets


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed on Linux alone")
def test_listing_connections_changes_none() -> None:
    def listen() -> socket.socket:
        return socket.create_server(("127.0.0.1", 0))

    before = socket.getdefaulttimeout()
    # Python makes each socket that it wraps non-blocking then, for every other user of the connection, too.
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


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed on Linux alone")
def test_reset_connections_are_ignored() -> None:
    sockets = Sockets()
    with sockets.listening(lambda: socket.create_server(("127.0.0.1", 0))) as server:
        lost = socket.create_connection(server.getsockname())
        kept = socket.create_connection(server.getsockname())
        with kept, server.accept()[0] as first, server.accept()[0]:
            sockets.look()
            # A process that is killed with unread bytes goes like this.
            lost.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            lost.close()
            with pytest.raises(ConnectionResetError):
                first.recv(1)
            with pytest.raises(OSError, match="not connected"):
                first.shutdown(socket.SHUT_RDWR)
            assert not sockets.shut()
            assert kept.recv(1) == b""
