"""What a stranger says first on the control port."""

from __future__ import annotations

import socket
import time

from unisono.control.channel import Greeting
from unisono.control.connection import Connection

REFUSALS = (ConnectionError,)
MEMORY = (1 << 19, 20)


def seeds() -> list[bytes]:
    greeting = Greeting(b"a guess", client=True)
    greeting.meet(Greeting(b"the secret", client=False).hello)
    # No stranger can say more that is taken.
    return [greeting.hello, greeting.hello + greeting.proof()[:20]]


def run(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(1, ours, b"the secret", time.monotonic() + 1.0)
        for start in range(0, min(len(data), 4096), 64):
            theirs.sendall(data[start : start + 64])
            assert connection.read() == [], "a stranger was heard"
            assert not connection.known, "a stranger was taken for a rank"
