"""Peers: implementations of collectives, one per file, that the benchmark measures in the same run as unisono."""

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
    """An implementation of collectives, with one instance per rank. The instances of all ranks connect to each other.

    Attributes:
        verified: Whether results can be checked; False for a peer that does not run the collective, such as a memory
            copy.
        needs_mpirun: Whether the peer works only in ranks that mpirun has started.
    """

    verified: ClassVar[bool] = True
    needs_mpirun: ClassVar[bool] = False

    @classmethod
    def obstacle(cls, workload: Workload) -> str | None:
        """Return a sentence that says why this peer cannot run the workload, and what to do; None if it can run.

        This method is called before ranks are started. Raises `UnavailableError` if something has to be installed
        first.
        """
        return None

    @abstractmethod
    def __init__(self, comm: Communicator, folder: Path) -> None:
        """Connect to the other ranks, over `comm` or through an empty folder that all ranks can access."""

    @abstractmethod
    def bind(self, workload: Workload, slot: Slot) -> Callable[[], object]:
        """Return a function that runs the collective on the slot's tensors; prepare all that calls can reuse."""

    def close(self) -> None:
        """Release all resources. The benchmark calls this method when no collective is running."""


PEERS: Registry[type[Peer]] = Registry("peer", "unisono.tools.bench.peers", "PEER")
"""Registry of peers: files in this package, and other packages' entry points in `unisono.tools.bench.peers`."""
