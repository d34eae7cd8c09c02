"""Replies of the control plane to a rank."""

from __future__ import annotations

from typing import Any

from unisono import serialization
from unisono.control.client_base import ControlClient, PendingRequest, SharedObjects, reply_of
from unisono.core.group import Group

REFUSALS = (ValueError,)
MEMORY = (1 << 19, 700)


class Deaf(ControlClient):
    """A handle whose requests go nowhere."""

    _where = "nowhere"

    def _send(self, number: int, words: tuple[Any, ...]) -> None:
        if words[0] == "join":
            self.take(serialization.encode((number, "ok", None)))

    def _notify(self, words: tuple[Any, ...]) -> None:
        pass

    def _wait(self, waiter: PendingRequest, timeout: float) -> bool:
        return waiter.reply is not None

    def close(self) -> None:
        pass

    def take(self, content: bytes) -> None:
        callback = self.receive(reply_of(content))
        if callback is not None:
            callback()


def seeds() -> list[bytes]:
    replies: list[Any] = [(1, "ok", None), (5, "ok", [b"a", b"b"]), (2, "failed", ("CommError", None, "because"))]
    return [serialization.encode(reply) for reply in replies]


def run(data: bytes) -> None:
    handle = Deaf(1.0, SharedObjects())
    handle.join(Group.world(0, 2), lambda cause: None)
    handle.take(data)
