"""A rank acquires its own lock and then the other's: two that do so concurrently deadlock."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.wrappers.base import Wrapper

ERROR = "no rank can continue"

LOCKS: list[threading.Lock] = []


class Mutant(Wrapper):
    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        if self.rank == 0:
            LOCKS.clear()
        while len(LOCKS) < self.size:
            LOCKS.append(threading.Lock())

    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        with LOCKS[self.rank], LOCKS[(self.rank + 1) % self.size]:
            return self.inner.post(batch)
