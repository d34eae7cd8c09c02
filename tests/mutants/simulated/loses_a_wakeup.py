"""Checks for a message, and then waits without checking again: it may have arrived in between."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.core.work import ChainedWork
from unisono.errors import CommTimeoutError
from unisono.wrappers.base import Wrapper

ERROR = "no rank can continue|waited"


class Hasty(ChainedWork):
    def __init__(self, inner: Work) -> None:
        super().__init__(inner)
        self._changed = threading.Condition()
        inner.get_future().add_done_callback(lambda _: self._tell())

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> None:
        if not self.is_completed():
            with self._changed:
                if not self._changed.wait(timeout):
                    raise CommTimeoutError("waited for a message", waited_s=timeout)
        super().wait(timeout)


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return Hasty(self.inner.post(batch))
