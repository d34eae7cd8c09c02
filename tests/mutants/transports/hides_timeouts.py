"""Returns from a timed-out wait as if the message had arrived."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.core.work import ChainedWork
from unisono.errors import CommTimeoutError
from unisono.wrappers.base import Wrapper

CHECK = "timed_out_wait_may_be_repeated"
ERROR = "^nothing was raised"


class Silent(ChainedWork):
    def wait(self, timeout: float | None = None) -> None:
        with suppress(CommTimeoutError):
            super().wait(timeout)


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return Silent(self.inner.post(batch))
