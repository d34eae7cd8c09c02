"""Reports messages of all tags as those of tag 0."""

from __future__ import annotations

from unisono.core.transport import Transport
from unisono.wrappers.base import Wrapper

BACKEND = "sim"
CHECK = "receive_any_separates_tags_and_subgroups"
ERROR = r"no rank can continue.* rank 0 waits for 4 B from rank 1, and ranks 1, 2 wait for rank 0 to receive 4 B"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def iprobe(self, peer: int, tag: int) -> bool:
        return self.inner.iprobe(peer, 0)
