"""First bytes of an unauthenticated connection to the control port."""

from __future__ import annotations

import socket

from unisono.control.handshake import AuthenticationError, Handshake
from unisono.control.sockets import Hello

REFUSALS = (ConnectionError, AuthenticationError)
MEMORY = (1 << 19, 20)


def seeds() -> list[bytes]:
    greeting = Hello(b"a guess", client=True)
    greeting.meet(Hello(b"the secret", client=False).hello)
    # No stranger can say more that is taken.
    return [greeting.hello, greeting.hello + greeting.proof()[:20]]


def run(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        handshake = Handshake(ours, b"the secret")
        for start in range(0, min(len(data), 4096), 64):
            theirs.sendall(data[start : start + 64])
            assert handshake.advance() is None, "a stranger was taken for a rank"
