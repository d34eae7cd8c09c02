"""Returns from a wait that took too long as if the message were there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from unisono.errors import CommTimeoutError
from unisono.transport import Transport
from unisono.types import Message, Work
from unisono.wrappers.wrapper import Wrapper

LAW = "a_wait_that_timed_out_may_be_repeated"
COMPLAINT = "^nothing was raised"


class Silent(Work):
    def __init__(self, inner: Work) -> None:
        self._inner = inner

    def wait(self, timeout: float | None = None) -> None:
        with suppress(CommTimeoutError):
            self._inner.wait(timeout)

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def get_future(self) -> torch.futures.Future[None]:
        return self._inner.get_future()


class Mutant(Wrapper):
    def rewrap(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return Silent(self.inner.post(batch))
