"""Shared memory with the collectives of the native core, and with algorithms by messages."""

from __future__ import annotations

from unittest.mock import patch

import unisono as un
from unisono.core.call import Call
from unisono.core.transport import Transport
from unisono.core.types import PointToPoint, Work
from unisono.transports.shm import ShmTransport
from unisono.wrappers.base import Wrapper

__all__ = ["without_core"]


class ByMessages(Wrapper):
    """Carries collectives out by messages, in the order of the core's sums, and compares nothing."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.checks = False
        self.balanced = True

    def wrap_child(self, inner: Transport) -> ByMessages:
        return ByMessages(inner)

    def compare(self, call: Call, deadline: float) -> None:
        pass

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        return Transport.run(self, call, over)


def without_core(comm: un.Communicator) -> un.Communicator:
    """Return another communicator of the same ranks whose collectives the core does not carry out. Collective."""
    split = ShmTransport.split
    with patch.object(ShmTransport, "split", lambda inner, group: ByMessages(split(inner, group))):
        return comm.dup()
