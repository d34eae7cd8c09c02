"""Ends of connections between ranks."""

from __future__ import annotations

import socket
import time

import pytest

from unisono.control import mesh
from unisono.errors import AbortedError, ClosedError


def test_nobody_is_waited_for_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.send(b"unread")
        monkeypatch.setattr(mesh, "_FAREWELL_S", 0.1)
        for broken in (None, ClosedError("closed")):
            started = time.monotonic()
            mesh.say_farewell([near], broken)
            assert time.monotonic() - started > 0.09
        monkeypatch.setattr(mesh, "_FAREWELL_S", 60.0)
        mesh.say_farewell([near], AbortedError("enough"))
        assert time.monotonic() - started < 50.0
        # The other end learns that no more comes.
        assert far.recv(1) == b""
