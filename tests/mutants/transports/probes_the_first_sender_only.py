"""Reports no rank's messages while a lower rank has some."""

from __future__ import annotations

from unisono.core.transport import Transport
from unisono.wrappers.base import Wrapper

BACKEND = "sim"
CHECK = "receive_any_starves_no_sender"
ERROR = "rank 0 is in probe"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def iprobe(self, peer: int, tag: int) -> bool:
        lower = [rank for rank in range(peer) if rank != self.rank]
        return self.inner.iprobe(peer, tag) and not any(self.inner.iprobe(rank, tag) for rank in lower)
