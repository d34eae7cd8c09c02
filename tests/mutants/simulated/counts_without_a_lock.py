"""Numbers its messages by an unlocked counter that all ranks share: two ranks may take one number."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.wrappers.base import Wrapper

ERROR = "a number was given out twice"

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
