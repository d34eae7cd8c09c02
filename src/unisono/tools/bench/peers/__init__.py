"""Peers: other implementations of a collective, one file each, measured alongside unisono in the same run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from unisono.communicator import Communicator
from unisono.core.registry import Registry
from unisono.tools.bench.workload import Slot, Workload

__all__ = ["PEERS", "Peer"]


class Peer(ABC):
    """An implementation of collectives, on one rank. Every rank constructs one, which connects the ranks.

    Attributes:
        verified: Whether it performs the collective, so that its results can be checked.
        needs_mpirun: Whether it works only in ranks that mpirun has started.
    """

    verified: ClassVar[bool] = True
    needs_mpirun: ClassVar[bool] = False

    @classmethod
    def obstacle(cls, workload: Workload) -> str | None:
        """Return why this peer cannot run the workload, in a sentence that says what to do; None if it can.

        Called before ranks are started. Raises `UnavailableError` if something has to be installed.
        """
        return None

    @abstractmethod
    def __init__(self, comm: Communicator, folder: Path) -> None:
        """Connect to the other ranks: over `comm`, or through an empty folder visible to all of them."""

    @abstractmethod
    def bind(self, workload: Workload, slot: Slot) -> Callable[[], object]:
        """Return the collective on this memory, with everything prepared that a program could reuse between calls."""

    def close(self) -> None:
        """Release everything; called when no call is running."""


PEERS: Registry[type[Peer]] = Registry("peer", "unisono.tools.bench.peers", "PEER")
"""A new peer is one new file, or an entry point `unisono.tools.bench.peers` of another package."""
