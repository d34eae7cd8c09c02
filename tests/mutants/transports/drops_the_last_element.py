"""Does not send the last element of a long message."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.wrappers.base import Wrapper

CHECK = "long_messages_arrive"
ERROR = r"messages of \[1025, 16385, 1048579\] elements were corrupted"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return self.inner.post([_without_the_last(message) for message in batch])


def _without_the_last(message: Message) -> Message:
    if not isinstance(message, Send) or message.tensor.numel() <= 1024:
        return message
    shorter = message.tensor.clone()
    shorter[-1] = 0
    return Send(shorter, message.peer, message.tag)
