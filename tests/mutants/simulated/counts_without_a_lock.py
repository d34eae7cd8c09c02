"""Numbers its messages by a counter that all ranks share: one takes the number that another is about to take."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.wrappers.base import Wrapper

COMPLAINT = "a number was given out twice"

GIVEN: list[int] = []


class Mutant(Wrapper):
    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        GIVEN.clear()

    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        number = len(GIVEN)
        # A lock of this rank's own guards nothing.
        with self._lock:
            GIVEN.append(number)
        assert GIVEN.count(number) == 1, "a number was given out twice"
        return self.inner.post(batch)
