"""Uses one channel for user messages and those of collectives."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.wrappers.base import Wrapper

BACKEND = "sim"
CHECK = "messages_and_collectives_are_separate"
ERROR = r"no rank can continue.* rank 0 waits for rank 1 to join 'call 2' .* rank 1 waits for 4 B from rank 0"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return self.inner.post([type(m)(m.tensor, m.peer, max(m.tag, 0)) for m in batch])
