"""Reports every message as arrived when it is posted."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.core.work import ChainedWork
from unisono.wrappers.base import Wrapper

CHECK = "work_reports_completion"
ERROR = r"done before, done after, error: \(True, "


class Early(ChainedWork):
    def is_completed(self) -> bool:
        return True


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return Early(self.inner.post(batch))
