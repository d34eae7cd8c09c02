"""Posts the messages of a batch from the last to the first."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Recv, Work
from unisono.wrappers.base import Wrapper

CHECK = "batch_keeps_its_order"
ERROR = r"rank 0 got \[\[12\.0, 11\.0, 10\.0\]"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        receives = [message for message in batch if isinstance(message, Recv)]
        sends = [message for message in batch if not isinstance(message, Recv)]
        return self.inner.post([*receives, *reversed(sends)])
