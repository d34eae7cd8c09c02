"""Requests of an authenticated rank to the control plane: the server ends its connection, and no other."""

from __future__ import annotations

from unisono import serialization
from unisono.control.state import ControlState

# The server ends a connection for any error; these are what a request out of form should raise.
REFUSALS = (ValueError, TypeError, KeyError)
MEMORY = (1 << 19, 700)

REQUESTS = [
    ("set", "key", b"value"),
    ("get", "key"),
    ("forget", 3),
    ("add", "count", 2),
    ("compare_set", "key", b"", b"x"),
    ("check", ["key", "other"]),
    ("delete", "key"),
    ("num_keys",),
    ("join", "world", 0, 2),
    ("join", "world/1.0", 0, 2, [0, 1]),
    ("leave", "world"),
    ("exchange", "world", "topic", b"mine", True),
    ("withdraw", "world", "topic", 1.0),
    ("fail", "world", "CommError", 0, "because"),
    ("cause", "world"),
    ("enrol", "world", 0, 2, "me"),
    ("stop", "world", "because"),
    ("verdict", "world"),
    ("rebuild", "world", 1, 1, [0, 1], b"terms"),
    ("apply",),
    ("bye",),
]


def seeds() -> list[bytes]:
    return [serialization.encode((7, words)) for words in REQUESTS]


def run(data: bytes) -> None:
    state = ControlState()
    for rank, client in ((0, 1), (1, 2)):
        state.handle(client, 1, ("join", "world", rank, 2))
    state.handle(2, 2, ("get", "answer"))
    try:
        request, words = serialization.decode(data)
        state.handle(1, request, words)
    finally:
        # No request affects other ranks, neither those that exchange with this one nor those that read its keys.
        state.handle(2, 3, ("exchange", "world", "topic", b"mine", True))
        state.lost(1)
        told = [reply for reply in state.handle(3, 9, ("set", "answer", b"42")) if reply[0] == 2]
        assert all(reply[1][1:] == ("ok", b"42") for reply in told)
        assert state.handle(3, 10, ("get", "answer"))[0][1][1] == "ok"
