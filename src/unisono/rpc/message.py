"""A message in the making, and one that has arrived, with all that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent

__all__ = ["MessageReader", "MessageWriter"]


class MessageWriter(list):  # type: ignore[type-arg]  # generic for checkers only
    """The parts of a message that is being made, and what belongs to it.

    Attributes:
        agent, peer: Who sends it, and to whom.
        bodies: Tensors that travel apart.
        context: Of autograd, or `NO_CONTEXT`.
        recorded: Tensors through which gradients flow back.
        undo: What is to be taken back if the message is not sent after all.
    """

    __slots__ = ("agent", "bodies", "context", "peer", "recorded", "undo")

    def __init__(self, agent: Agent, peer: int, context: int) -> None:
        super().__init__()
        self.agent, self.peer, self.context = agent, peer, context
        self.bodies: list[torch.Tensor] = []
        self.recorded: list[torch.Tensor] = []
        self.undo: list[Callable[[], None]] = []


class MessageReader(bytes):
    """The bytes of a message that arrived, and what belongs to them.

    Attributes:
        agent, peer: Who takes it, and from whom.
        bodies: What travelled apart.
        context, message: Of autograd; the number of the message in it.
        refused: Of a function in it that is not exposed here. Raised when all has been read: what follows may be
            references, which have to be counted.
    """

    agent: Agent
    peer: int
    bodies: Sequence[torch.Tensor]
    context: int
    message: int
    tensors: int
    refused: Exception | None
