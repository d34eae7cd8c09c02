"""Messages being written and being read, with their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from unisono.rpc.exported import ExportTable

__all__ = ["Endpoint", "MessageReader", "MessageWriter", "Recorder", "ReferenceTable"]


class ReferenceTable(Protocol):
    """References of a rank, as messages need them."""

    def pass_on(self, rref: Any, parts: MessageWriter) -> tuple[int, int, int, int]:
        """Prepare a reference for a rank; return the numbers to send."""

    def accept(self, passer: int, owner: int, creator: int, number: int, token: int) -> Any:
        """Return the reference for received numbers."""

    def collect_freed(self) -> None:
        """Release freed objects."""


class Recorder(Protocol):
    """Record of the tensors with a history that messages of an autograd context carry."""

    def met(self, number: int, peer: int) -> None:
        """Record that a message of the context is sent to a rank."""

    def send(self, number: int, peer: int, tensors: list[torch.Tensor]) -> int:
        """Record tensors that are sent to a rank. Return the number of their message."""

    def receive(self, number: int, peer: int, message: int, tensor: torch.Tensor) -> torch.Tensor:
        """Record a received tensor. Return it connected to its sender's graph."""


class Endpoint(Protocol):
    """One rank's end of messages: its functions, its references, and its record of tensors."""

    rank: int
    exposed: ExportTable
    references: ReferenceTable
    recorder: Recorder


class MessageWriter(list):  # type: ignore[type-arg]  # generic for checkers only
    """Parts of a message being written, with its state.

    Attributes:
        endpoint, peer: Sender and receiver.
        bodies: Tensors sent separately.
        context: Autograd context, or `NO_CONTEXT`.
        recorded: Tensors through which gradients flow back.
        undo: Actions to revert if the message is not sent after all.
    """

    __slots__ = ("bodies", "context", "endpoint", "peer", "recorded", "undo")

    endpoint: Endpoint
    peer: int
    context: int
    bodies: list[torch.Tensor]
    recorded: list[torch.Tensor]
    undo: list[Callable[[], None]]


class MessageReader(bytes):
    """Bytes of a received message, with its state.

    Attributes:
        endpoint, peer: Receiver and sender.
        bodies: Tensors received separately.
        context, message: Autograd context, and the number of the message in it.
        tensors: Number of bodies read.
        refused: Error of a function in it that is not exposed here. Raised after everything has been read, because
            references may follow, which have to be counted.
    """

    endpoint: Endpoint
    peer: int
    bodies: Sequence[torch.Tensor]
    context: int
    message: int
    tensors: int
    refused: Exception | None
