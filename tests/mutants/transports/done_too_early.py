"""Says of every message at once that it has arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.transport import Transport
from unisono.types import Message, Work
from unisono.wrappers.wrapper import Wrapper

LAW = "a_work_knows_whether_it_is_done"
COMPLAINT = r"done before, done after, error: \(True, "


class Early(Work):
    def __init__(self, inner: Work) -> None:
        self._inner = inner

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)

    def is_completed(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def get_future(self) -> torch.futures.Future[None]:
        return self._inner.get_future()


class Mutant(Wrapper):
    def rewrap(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return Early(self.inner.post(batch))
