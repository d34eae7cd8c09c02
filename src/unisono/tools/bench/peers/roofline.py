"""Memory roofline of this host: all ranks copy their message concurrently, and read and write each byte once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from unisono.communicator import Communicator
from unisono.tools.bench.peers import Peer
from unisono.tools.bench.workload import Slot, Workload

__all__ = ["PEER", "Roofline"]


class Roofline(Peer):
    """Copies each message of S bytes within this rank's memory: 2S bytes of traffic, the minimum for an all_reduce."""

    verified = False

    @classmethod
    def obstacle(cls, workload: Workload) -> str | None:
        return "a barrier moves nothing: it has no roofline" if workload.collective == "barrier" else None

    def __init__(self, comm: Communicator, folder: Path) -> None:
        self._copy = torch.empty(0)

    def bind(self, workload: Workload, slot: Slot) -> Callable[[], object]:
        source = slot.source
        if self._copy.dtype != source.dtype or self._copy.numel() != source.numel():
            self._copy = torch.empty_like(source).zero_()
        copy = self._copy
        return lambda: copy.copy_(source)


PEER = Roofline
