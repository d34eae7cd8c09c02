"""Reports a message before it was sent."""

from __future__ import annotations

from unisono.core.transport import Transport
from unisono.wrappers.base import Wrapper

BACKEND = "sim"
CHECK = "probe_consumes_nothing"
ERROR = r"before any was sent|rank 2 has left|for 4 B from rank 2"


class Mutant(Wrapper):
    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def iprobe(self, peer: int, tag: int) -> bool:
        return True
