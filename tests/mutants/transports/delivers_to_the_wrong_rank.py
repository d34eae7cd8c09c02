"""Swaps the messages of two ranks: those for rank 2 reach rank 3, and the reverse."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.wrappers.base import Wrapper

CHECK = "peers_are_separate"
ERROR = r"rank 2 got \[3\.0, 13\.0"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return self.inner.post([self._swapped(message) for message in batch])

    def _swapped(self, message: Message) -> Message:
        if isinstance(message, Send) and {2, 3} == {message.peer, 5 - message.peer} and self.rank < 2:
            return Send(message.tensor, 5 - message.peer, message.tag)
        return message
