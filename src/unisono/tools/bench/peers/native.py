"""The transport's native collective, as a baseline for the algorithms that unisono composes from messages."""

from __future__ import annotations

from pathlib import Path

from unisono.communicator import Communicator
from unisono.tools.bench.peers.unisono import UnisonoPeer

__all__ = ["PEER", "NativePeer"]


class NativePeer(UnisonoPeer):
    """Unisono with `algorithm="native"`, on ordinary rather than registered memory."""

    def __init__(self, comm: Communicator, folder: Path) -> None:
        super().__init__(comm, folder, "native")


PEER = NativePeer
