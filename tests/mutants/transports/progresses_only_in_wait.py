"""Receives messages only while a thread waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.core.work import Completion
from unisono.wrappers.base import Wrapper

CHECK = "work_completes_without_polling"
ERROR = "not complete after 0.5 s without a wait"


class Lazy(Completion):
    def __init__(self, inner: Work) -> None:
        super().__init__(10.0)
        self._inner = inner

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)
        self.complete()


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return Lazy(self.inner.post(batch))
