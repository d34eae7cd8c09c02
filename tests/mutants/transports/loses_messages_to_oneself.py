"""Loses what a rank sends to itself, as a backend that connects pairs of ranks only."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.wrappers.base import Wrapper

CHECK = "messages_to_oneself_arrive"
ERROR = r"rank 0 of 1 got \[\[-1\.0, -1\.0, -1\.0\]"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return self.inner.post([message for message in batch if message.peer != self.rank])
