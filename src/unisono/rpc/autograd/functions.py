"""The two ends of a message in the autograd graph: where tensors are sent, and where they are received."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["RecvRecord", "SendRecord", "arrival", "departure", "reachable"]


class SendRecord:
    """Tensors sent in one message.

    Attributes:
        token: A tensor with the combined history of the sent tensors at the time they were sent.
        gradients: Gradient of each sent tensor, set before back-propagating from `token`.
    """

    def __init__(self) -> None:
        self.token: torch.Tensor | None = None
        self.gradients: list[torch.Tensor | None] = []


class RecvRecord:
    """Tensors received in one message.

    Attributes:
        peer, message: The sender, and the message's number on that rank.
        triggers: For each tensor, an artificial leaf from which the tensor's history begins.
        found: Where the current backward pass sums the tensors' gradients, by the tensor's index in the message; sums
            of a plain `backward()`, which belongs to no distributed pass, are discarded.
    """

    def __init__(self, peer: int, message: int) -> None:
        self.peer = peer
        self.message = message
        self.triggers: list[torch.Tensor] = []
        self.found: dict[int, torch.Tensor] = {}


class _SendBackward(torch.autograd.Function):
    """Map many tensors to a token; `backward` returns the gradients received for the tensors."""

    @staticmethod
    def forward(ctx: Any, record: SendRecord, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.record = record
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        return None, *ctx.record.gradients


class _RecvBackward(torch.autograd.Function):
    """Create a tensor that depends only on an artificial leaf; `backward` stores its gradient for the sender."""

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, record: RecvRecord, index: int, content: list[torch.Tensor]) -> Any:
        ctx.record = record
        ctx.index = index
        # To autograd, `.data` is an independent tensor, not a view of the received bytes, so the receiver may modify it
        # in place.
        return content.pop().data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = ctx.record.found
        found[ctx.index] = found[ctx.index] + gradients[0] if ctx.index in found else gradients[0]
        return None, None, None, None


def departure(tensors: list[torch.Tensor]) -> SendRecord:
    """Record the tensors sent in one message, in the given order."""
    record = SendRecord()
    with torch.enable_grad():
        # Torch's apply is untyped.
        record.token = _SendBackward.apply(record, *tensors)  # type: ignore[no-untyped-call]
    return record


def arrival(record: RecvRecord, tensor: torch.Tensor) -> torch.Tensor:
    """Return the next tensor of a message, with a history that begins at a new artificial leaf."""
    trigger = torch.zeros((), requires_grad=True)
    index = len(record.triggers)
    record.triggers.append(trigger)
    # Torch's apply is untyped.
    arrived: torch.Tensor = _RecvBackward.apply(trigger, record, index, [tensor])  # type: ignore[no-untyped-call]
    return arrived


def reachable(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[RecvRecord]]:
    """Return the leaves (including triggers) and messages that a backward pass from `tensors` reaches on this rank."""
    leaves: dict[int, torch.Tensor] = {id(t): t for t in tensors if t.grad_fn is None and t.requires_grad}
    records: dict[int, RecvRecord] = {}
    for node in _nodes([t.grad_fn for t in tensors if t.grad_fn is not None]):
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        record = getattr(node, "record", None)
        if isinstance(record, RecvRecord):
            records[id(record)] = record
    return list(leaves.values()), list(records.values())


def _nodes(starts: list[Any]) -> Iterator[Any]:
    """Yield the given graph nodes and all graph nodes that are reachable from them, each only once."""
    seen = set(starts)
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
