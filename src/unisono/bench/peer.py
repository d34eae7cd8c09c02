"""What a contender of the benchmark is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from unisono.bench.problem import Problem, Slot
from unisono.communicator import Communicator

__all__ = ["Peer"]


class Peer(ABC):
    """A way to do collectives, on one rank. Every rank makes one; they meet each other when it is made.

    Attributes:
        verified: Whether it does the collective, so that its results can be checked.
        needs_mpirun: Whether it works only in ranks that mpirun has started.
    """

    verified: ClassVar[bool] = True
    needs_mpirun: ClassVar[bool] = False

    @classmethod
    def obstacle(cls, problem: Problem) -> str | None:
        """Why this peer cannot do that, in a sentence that says what can be done; None if it can.

        Asked before ranks are started. Raises `UnavailableError` if something has to be installed.
        """
        return None

    @abstractmethod
    def __init__(self, comm: Communicator, folder: Path) -> None:
        """Meet the other ranks: over `comm`, or in an empty folder that all of them see."""

    @abstractmethod
    def bind(self, problem: Problem, slot: Slot) -> Callable[[], object]:
        """The collective on this memory, prepared as far as a program could keep it. To call it takes part in it."""

    def close(self) -> None:
        """Let go of everything; no call is under way."""
