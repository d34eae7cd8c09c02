"""Back-propagation over several ranks: first discover the ranks that take part, then let the gradients flow.

A message between ranks is an edge of the graph: gradients return to the sender of its tensors once everything that
the receiver computed from them has been back-propagated. The number of contributions is determined first: starting
from the roots, each rank walks its own graph from the queried outputs to the messages that they were computed from,
and queries the senders of these (`discover`). So tensors that were sent but never used block nothing, and each
gradient is sent once. Both phases are calls that are answered when all calls that they caused are: when the first
one returns, everything is done.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from unisono.errors import CommError
from unisono.rpc.autograd.contexts import Context
from unisono.rpc.autograd.functions import RecvRecord, SendRecord, reachable
from unisono.rpc.context import current_agent
from unisono.rpc.exported import async_execution, expose
from unisono.rpc.rref import RRef

__all__ = ["BackwardPass", "Output", "backward_of", "discover", "propagate", "start"]

_Gradients = list[torch.Tensor | None]
_numbers = itertools.count(1)


class Output:
    """Starting point of back-propagation on one rank: the roots, or the tensors of one sent message.

    Attributes:
        record: Record of the message; None for the roots.
        tensors: Tensors to back-propagate from.
        leaves: Leaves reached on this rank.
        received: Received messages that are reached.
    """

    def __init__(self, tensors: list[torch.Tensor], record: SendRecord | None = None) -> None:
        self.tensors, self.record = tensors, record
        self.leaves, self.received = reachable(tensors)


class BackwardPass:
    """One backward pass on one rank.

    Args:
        context: Context that it is part of.
        retain_graph: Whether the graph is kept for another pass.
    """

    def __init__(self, context: Context, retain_graph: bool) -> None:
        self._context, self._retain_graph = context, retain_graph
        self._outputs: dict[int, Output] = {}
        self._left = 0
        self._awaited: Counter[tuple[int, int]] = Counter()
        self._gathered: dict[tuple[int, int], _Gradients] = {}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}

    def join(self, number: int, output: Output) -> list[RecvRecord]:
        """Add an output that gradients will flow back from. Return the messages not yet queried."""
        self._outputs[number] = output
        triggers = {id(trigger) for record in output.received for trigger in record.triggers}
        self._context.leaves.watch([leaf for leaf in output.leaves if id(leaf) not in triggers])
        self._left += 1
        new = []
        for record in output.received:
            key = record.peer, record.message
            if self._context.received.get(key) is not record:
                raise RuntimeError(
                    f"a tensor from rank {record.peer} was received in another autograd context than that of this "
                    "backward pass: call backward in the tensor's context, or detach() it"
                )
            if key not in self._gathered:
                self._gathered[key] = [None] * len(record.triggers)
                new.append(record)
            self._awaited[key] += 1
        return new

    def joined(self, number: int) -> bool:
        """Return whether this output has joined."""
        return number in self._outputs

    def flow(
        self, number: int, gradients: _Gradients | None
    ) -> tuple[list[tuple[RecvRecord, _Gradients]], dict[torch.Tensor, torch.Tensor] | None]:
        """Back-propagate from one output. Return the messages with now complete gradients.

        After the last output, also return the summed gradients of this rank's leaves.

        Args:
            number: Number of the output.
            gradients: Gradients of its tensors; None for the roots (gradient 1).
        """
        context, output = self._context, self._outputs[number]
        with context.lock:
            self._left -= 1
            if gradients is None or any(gradient is not None for gradient in gradients):
                self._differentiate(output, gradients, self._retain_graph or self._left > 0)
            complete = []
            for record in output.received:
                key = record.peer, record.message
                self._gather(key, record)
                self._awaited[key] -= 1
                if not self._awaited[key]:
                    complete.append((record, self._gathered.pop(key)))
            if not self._retain_graph and output.record is not None:
                # Its part of the graph has been freed.
                context.sent.pop(number, None)
            return complete, None if self._left else self._gradients

    def _differentiate(self, output: Output, gradients: _Gradients | None, retain_graph: bool) -> None:
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
            raise RuntimeError(f"{_TWICE} ({error})") from None
        for leaf, gradient in zip(output.leaves, _apart(found, gradients or ()), strict=True):
            # A trigger, which stands for a message, has none.
            if gradient is not None:
                known = self._gradients.get(leaf)
                self._gradients[leaf] = gradient if known is None else known + gradient

    def _gather(self, key: tuple[int, int], record: RecvRecord) -> None:
        found, record.found = record.found, {}
        gathered = self._gathered[key]
        for place, gradient in found.items():
            known = gathered[place]
            gathered[place] = gradient if known is None else known + gradient


def _apart(found: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> _Gradients:
    """Copy gradients to memory of their own: autograd returns one tensor for all terms of a sum, and expanded ones."""
    taken = {_memory(other) for other in others if other is not None}
    apart: _Gradients = []
    for gradient in found:
        if gradient is not None and gradient.layout == torch.strided:
            if _memory(gradient) in taken or 0 in gradient.stride():
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            taken.add(_memory(gradient))
        apart.append(gradient)
    return apart


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


_TWICE = (
    "this part of the graph was freed by an earlier backward pass: pass retain_graph=True to all backward passes "
    "of a context but the last"
)


def start(context: Context, roots: Any, retain_graph: bool) -> None:
    """Run the whole pass from the rank that has the roots. Returns when all ranks are done."""
    roots = _checked(roots)
    name = current_agent().rank, next(_numbers)
    beginning = context.passes[name] = BackwardPass(context, retain_graph)
    try:
        with context.lock:
            new = beginning.join(0, Output(roots))
        _all([_ask(context.number, name, new, retain_graph)]).wait()
        _all(_flow(context, name, 0, None)).wait()
    finally:
        context.passes.pop(name, None)


def _checked(roots: Any) -> list[torch.Tensor]:
    found = [] if isinstance(roots, torch.Tensor) or not isinstance(roots, Iterable) else list(roots)
    if not found:
        raise ValueError("roots must be a list of tensors, at least one")
    for root in found:
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"a root must be a tensor (a loss), not a {type(root).__name__}")
        if root.numel() != 1:
            raise ValueError(f"a root must have one element (a loss), not the shape {list(root.shape)}")
        if not root.requires_grad:
            raise ValueError("a root has no history: nothing that requires a gradient was used to compute it")
    return found


@expose
@async_execution
def discover(
    number: int, name: tuple[int, int], messages: Sequence[int], retain_graph: bool
) -> torch.futures.Future[Any]:
    """Announce gradients to the sender of some messages. Answered when all earlier senders are notified, too."""
    context = _known(number)
    new: list[RecvRecord] = []
    with context.lock:
        taking_part = context.passes.setdefault(name, BackwardPass(context, retain_graph))
        for message in messages:
            if not taking_part.joined(message):
                record = context.sent.get(message)
                if record is None or record.token is None:
                    raise RuntimeError(_TWICE)
                new += taking_part.join(message, Output([record.token], record))
    return _all([_ask(number, name, new, retain_graph)])


@expose
@async_execution
def propagate(number: int, name: tuple[int, int], message: int, gradients: _Gradients) -> torch.futures.Future[Any]:
    """Pass the gradients of a message's tensors to its sender. Answered when they have been fully back-propagated."""
    return _all(_flow(_known(number), name, message, gradients))


@expose
def backward_of(number: int, reference: RRef[torch.Tensor], retain_graph: bool) -> None:
    """Back-propagate from a tensor, on its owner."""
    start(_known(number), [reference.local_value()], retain_graph)


def _known(number: int) -> Context:
    context = current_agent().contexts.reach(number)
    if context is None:
        raise CommError(f"the autograd context {number} has ended on rank {current_agent().rank}")
    return context


def _ask(
    number: int, name: tuple[int, int], records: Sequence[RecvRecord], retain_graph: bool
) -> torch.futures.Future[Any]:
    """Query the senders of some messages."""
    agent, senders = current_agent(), dict[int, list[int]]()
    for record in records:
        senders.setdefault(record.peer, []).append(record.message)
    calls = [
        agent.rpc_async(peer, discover, (number, name, messages, retain_graph)) for peer, messages in senders.items()
    ]
    return _all(calls)


def _flow(
    context: Context, name: tuple[int, int], message: int, gradients: _Gradients | None
) -> list[torch.futures.Future[Any]]:
    """Back-propagate from an output here, and send the gradients that are complete."""
    taking_part = context.passes.get(name)
    if taking_part is None or not taking_part.joined(message):
        raise CommError(f"received gradients for message {message}, which is not part of this pass")
    complete, sums = taking_part.flow(message, gradients)
    agent = current_agent()
    calls: list[torch.futures.Future[Any]] = [
        agent.rpc_async(record.peer, propagate, (context.number, name, record.message, grads))
        for record, grads in complete
    ]
    if sums is not None:
        # After the calls: hooks may wait for ranks that wait for these.
        context.passes.pop(name, None)
        context.accumulate(sums)
    return calls


def _all(futures: Sequence[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
    """Complete when all futures have, with the first error, if any. Torch's own version would change the error."""
    done: torch.futures.Future[Any] = torch.futures.Future()
    left, errors = itertools.count(len(futures) - 1, -1), list[Exception]()

    def ended(future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except Exception as error:
            errors.append(error)
        if next(left):
            return
        if errors:
            done.set_exception(errors[0])
        else:
            done.set_result(None)

    for future in futures:
        future.add_done_callback(ended)
    if not futures:
        done.set_result(None)
    return done
