"""Messages being written and being read, with their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent

__all__ = ["MessageReader", "MessageWriter"]


class MessageWriter(list):  # type: ignore[type-arg]  # generic for checkers only
    """Parts of a message being written, with its state.

    Attributes:
        agent, peer: Sender and receiver.
        bodies: Tensors sent separately.
        context: Autograd context, or `NO_CONTEXT`.
        recorded: Tensors through which gradients flow back.
        undo: Actions to revert if the message is not sent after all.
    """

    __slots__ = ("agent", "bodies", "context", "peer", "recorded", "undo")

    def __init__(self, agent: Agent, peer: int, context: int) -> None:
        super().__init__()
        self.agent, self.peer, self.context = agent, peer, context
        self.bodies: list[torch.Tensor] = []
        self.recorded: list[torch.Tensor] = []
        self.undo: list[Callable[[], None]] = []


class MessageReader(bytes):
    """Bytes of a received message, with its state.

    Attributes:
        agent, peer: Receiver and sender.
        bodies: Tensors received separately.
        context, message: Autograd context, and the number of the message in it.
        refused: Error of a function in it that is not exposed here. Raised after everything has been read, because
            references may follow, which have to be counted.
    """

    agent: Agent
    peer: int
    bodies: Sequence[torch.Tensor]
    context: int
    message: int
    tensors: int
    refused: Exception | None
