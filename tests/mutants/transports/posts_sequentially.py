"""Does not start a message of a batch before the previous one has arrived."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.wrappers.base import Wrapper

BACKEND = "sim"
CHECK = "batch_does_not_deadlock"
ERROR = r"no rank can continue.* waits in wait at posts_sequentially.py:\d+ for 1.0 MiB from rank 3"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        for message in batch:
            self.inner.post([message]).wait(1.0)
        return self.inner.post([])
