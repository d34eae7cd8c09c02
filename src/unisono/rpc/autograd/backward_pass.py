"""One rank's part of an autograd context, and of the context's backward passes."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from unisono.rpc.autograd.functions import RecvRecord, SendRecord, reachable
from unisono.rpc.autograd.leaves import Leaves

__all__ = ["GRAPH_GONE", "Context", "DistributedPass", "Gradients"]

Gradients = list[torch.Tensor | None]

GRAPH_GONE = (
    "this part of the graph was freed by an earlier backward pass: pass retain_graph=True to all backward passes "
    "of a context but the last"
)


class Context:
    """One rank's part of a context.

    Args:
        number: The context's number, the same on every rank.
        leaves: Leaves of all contexts of this rank.

    Attributes:
        lock: Lock held while gradients are computed on this rank; serializes backward passes.
        sent: Sent tensors, by message number.
        received: Received tensors, by sender and message number.
        gradients: Gradients of this rank's leaves.
        peers: Ranks to which this rank has announced the context.
        passes: Backward passes in progress.
    """

    def __init__(self, number: int, leaves: Leaves) -> None:
        self.number = number
        self.leaves = leaves
        self.lock: threading.RLock = threading.RLock()
        self.numbers: itertools.count[int] = itertools.count(1)
        self.sent: dict[int, SendRecord] = {}
        self.received: dict[tuple[int, int], RecvRecord] = {}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.peers: set[int] = set()
        self.passes: dict[tuple[int, int], DistributedPass] = {}

    def accumulate(self, sums: dict[torch.Tensor, torch.Tensor]) -> None:
        """Add the gradients that leaves received in one backward pass, after running the leaves' hooks."""
        found = self.leaves.accumulate(sums) if sums else {}
        with self.lock:
            for leaf, gradient in found.items():
                known = self.gradients.get(leaf)
                self.gradients[leaf] = gradient if known is None else known + gradient


class _Output(NamedTuple):
    """Starting point of back-propagation on one rank: the roots, or the tensors of one sent message.

    Attributes:
        record: Record of the message; None for the roots.
        tensors: Tensors to back-propagate from.
        leaves: Leaves reached on this rank.
        received: Received messages that the backward pass reaches.
    """

    record: SendRecord | None
    tensors: list[torch.Tensor]
    leaves: list[torch.Tensor]
    received: list[RecvRecord]


class DistributedPass:
    """One backward pass on one rank.

    Args:
        context: Context that the backward pass belongs to.
        retain_graph: Whether the graph is kept for another backward pass.
    """

    def __init__(self, context: Context, retain_graph: bool) -> None:
        self._context = context
        self._retain_graph = retain_graph
        self._outputs: dict[int, _Output] = {}
        self._left = 0
        self._awaited: Counter[tuple[int, int]] = Counter()
        self._gathered: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}

    def join(self, number: int, tensors: list[torch.Tensor], record: SendRecord | None = None) -> list[RecvRecord]:
        """Add an output from which gradients will flow back. Return the messages whose senders must be queried."""
        output = self._outputs[number] = _Output(record, tensors, *reachable(tensors))
        triggers = {id(trigger) for reached in output.received for trigger in reached.triggers}
        self._context.leaves.watch([leaf for leaf in output.leaves if id(leaf) not in triggers])
        self._left += 1
        new = []
        for reached in output.received:
            key = reached.peer, reached.message
            if self._context.received.get(key) is not reached:
                raise RuntimeError(
                    f"a tensor from rank {reached.peer} was received in another autograd context than that of this "
                    "backward pass: call backward in the tensor's context, or detach() it"
                )
            if key not in self._gathered:
                self._gathered[key] = {}
                new.append(reached)
            self._awaited[key] += 1
        return new

    def joined(self, number: int) -> bool:
        """Return whether this output has been added."""
        return number in self._outputs

    def flow(
        self, number: int, gradients: Gradients | None
    ) -> tuple[list[tuple[RecvRecord, Gradients]], dict[torch.Tensor, torch.Tensor] | None]:
        """Back-propagate from one output; return the messages whose gradients are now complete.

        After the last output, also return the summed gradients of this rank's leaves.

        Args:
            number: Number of the message that contained the output; 0 for the roots.
            gradients: Gradients of the output's tensors; None for the roots, whose gradient is 1.
        """
        context = self._context
        output = self._outputs[number]
        with context.lock:
            self._left -= 1
            for record in output.received:
                record.found = self._gathered[record.peer, record.message]
            if gradients is None or any(gradient is not None for gradient in gradients):
                self._differentiate(output, gradients, self._retain_graph or self._left > 0)
            complete = []
            for record in output.received:
                key = record.peer, record.message
                # The record outlives the pass. It must neither keep the gradients alive, nor add to them the gradients
                # of a plain backward() of torch.
                record.found = {}
                self._awaited[key] -= 1
                if not self._awaited[key]:
                    found = self._gathered.pop(key)
                    complete.append((record, [found.get(index) for index in range(len(record.triggers))]))
            if not self._retain_graph and output.record is not None:
                # The message's part of the graph has been freed, so its record is no longer needed.
                context.sent.pop(number, None)
            return complete, None if self._left else self._gradients

    def _differentiate(self, output: _Output, gradients: Gradients | None, retain_graph: bool) -> None:
        if not output.leaves:
            return
        starts = None
        if output.record is not None:
            assert gradients is not None
            output.record.gradients = gradients
            starts = [torch.zeros(())]
        try:
            leaves = self._context.leaves
            found = leaves.differentiate(output.tensors, output.leaves, starts, retain_graph=retain_graph)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise RuntimeError(f"{GRAPH_GONE} ({error})") from None
        for leaf, gradient in zip(output.leaves, _apart(found, gradients or ()), strict=True):
            # Triggers, the leaves that represent received tensors, get no gradient.
            if gradient is not None:
                known = self._gradients.get(leaf)
                self._gradients[leaf] = gradient if known is None else known + gradient


def _apart(found: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> Gradients:
    """Copy gradients that share memory: autograd may return one tensor for all terms of a sum, or return views."""
    taken = {_memory(other) for other in others if other is not None}
    apart: Gradients = []
    for gradient in found:
        if gradient is not None and gradient.layout == torch.strided:
            if _memory(gradient) in taken or 0 in gradient.stride():
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            taken.add(_memory(gradient))
        apart.append(gradient)
    return apart


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
