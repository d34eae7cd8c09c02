"""Treats all user tags as one."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.wrappers.base import Wrapper

CHECK = "tags_are_separate"
ERROR = "tags 0, 1, 7 and .* brought"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        return self.inner.post([type(m)(m.tensor, m.peer, min(m.tag, 0)) for m in batch])
