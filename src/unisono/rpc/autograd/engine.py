"""Back-propagation over several ranks: phase one discovers the participants, and phase two sends the gradients.

A message between ranks is an edge of the graph. Gradients return to the sender of the message once everything that the
receiver computed from the message's tensors has been back-propagated. A receiver must therefore know how many
contributions to a message's gradients to expect. The first phase, which begins with the roots, counts the
contributions: each rank walks its graph back from the queried outputs to the received messages that they depend on, and
then queries the senders of these messages (`discover`). Tensors that were sent but not used do not block the backward
pass, and each gradient is sent once. In both phases, a call is answered only after all calls that it caused have been
answered, so the whole phase is done when the first call returns.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from unisono.errors import CommError
from unisono.rpc.autograd.backward_pass import GRAPH_GONE, Context, DistributedPass, Gradients
from unisono.rpc.autograd.functions import RecvRecord, arrival, departure
from unisono.rpc.autograd.leaves import Leaves
from unisono.rpc.client import rpc_async, rpc_sync
from unisono.rpc.context import current_agent
from unisono.rpc.exported import async_execution, expose
from unisono.rpc.protocol import DISCARD, NO_CONTEXT
from unisono.rpc.rref import RRef

__all__ = ["Contexts", "backward_of", "current_contexts", "discover", "find", "propagate", "start"]

_numbers = itertools.count(1)
"""Numbers of backward passes started in this process. A pass is identified by the starting rank and its number."""


def current_contexts() -> Contexts:
    """Return the contexts known to this thread's agent."""
    found = current_agent().contexts
    assert isinstance(found, Contexts)
    return found


def find(number: int) -> Context:
    """Return a context of this rank. Raises CommError if this rank does not have the context."""
    found = current_contexts().get(number) if isinstance(number, int) else None
    if found is None:
        raise CommError(
            f"there is no autograd context {number!r} on this rank; pass the number that context() returned"
        )
    return found


def start(context: Context, roots: Any, retain_graph: bool) -> None:
    """Run the whole backward pass from the rank that has the roots. Returns when all ranks are done."""
    roots = _checked(roots)
    name = current_agent().rank, next(_numbers)
    beginning = context.passes[name] = DistributedPass(context, retain_graph)
    try:
        with context.lock:
            new = beginning.join(0, roots)
        _all([_request(context.number, name, new, retain_graph)]).wait()
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
    """Prepare to receive gradients for messages that this rank has sent.

    The reply is sent once the senders of all messages that these messages depend on have also prepared.
    """
    context = _known(number)
    new: list[RecvRecord] = []
    with context.lock:
        taking_part = context.passes.setdefault(name, DistributedPass(context, retain_graph))
        for message in messages:
            if not taking_part.joined(message):
                record = context.sent.get(message)
                if record is None or record.token is None:
                    raise RuntimeError(GRAPH_GONE)
                new += taking_part.join(message, [record.token], record)
    return _all([_request(number, name, new, retain_graph)])


@expose
@async_execution
def propagate(number: int, name: tuple[int, int], message: int, gradients: Gradients) -> torch.futures.Future[Any]:
    """Back-propagate gradients for a message that this rank has sent. Replies when back-propagation is complete."""
    return _all(_flow(_known(number), name, message, gradients))


@expose
def backward_of(number: int, reference: RRef[torch.Tensor], retain_graph: bool) -> None:
    """Back-propagate from a tensor, on the rank that owns it."""
    start(_known(number), [reference.local_value()], retain_graph)


def _known(number: int) -> Context:
    context = current_contexts().reach(number)
    if context is None:
        raise CommError(f"the autograd context {number} has ended on rank {current_agent().rank}")
    return context


def _request(
    number: int, name: tuple[int, int], records: Sequence[RecvRecord], retain_graph: bool
) -> torch.futures.Future[Any]:
    """Query the senders of some messages."""
    senders = dict[int, list[int]]()
    for record in records:
        senders.setdefault(record.peer, []).append(record.message)
    calls = [rpc_async(peer, discover, (number, name, messages, retain_graph)) for peer, messages in senders.items()]
    return _all(calls)


def _flow(
    context: Context, name: tuple[int, int], message: int, gradients: Gradients | None
) -> list[torch.futures.Future[Any]]:
    """Back-propagate from an output on this rank, and send the gradients that are complete."""
    taking_part = context.passes.get(name)
    if taking_part is None or not taking_part.joined(message):
        raise CommError(f"received gradients for message {message}, which is not part of this pass")
    complete, sums = taking_part.flow(message, gradients)
    calls: list[torch.futures.Future[Any]] = [
        rpc_async(record.peer, propagate, (context.number, name, record.message, grads)) for record, grads in complete
    ]
    if sums is not None:
        # Run hooks after making the calls, because the hooks may wait for ranks that wait for these calls.
        context.passes.pop(name, None)
        context.accumulate(sums)
    return calls


def _all(futures: Sequence[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
    """Return a future that waits for all futures, and fails with the first error, unaltered (unlike collect_all)."""
    done: torch.futures.Future[Any] = torch.futures.Future()
    left = itertools.count(len(futures) - 1, -1)
    errors = list[Exception]()

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


_RANK_BITS = 48
_ENDED_KEPT = 4096


class Contexts:
    """Contexts known to an agent.

    Args:
        rank: This rank.
        send: Function that sends a message of a few numbers to a rank.

    Attributes:
        leaves: Leaves of all contexts.
    """

    def __init__(self, rank: int, send: Callable[..., None]) -> None:
        self._rank = rank
        self._send = send
        self._lock = threading.Lock()
        self.leaves: Leaves = Leaves()
        self._numbers = itertools.count(1)
        self._open: dict[int, Context] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self) -> int:
        """Open a new context; return its number."""
        number = self._rank << _RANK_BITS | next(self._numbers)
        with self._lock:
            self._open[number] = Context(number, self.leaves)
        return number

    def get(self, number: int) -> Context | None:
        """Return a context; None if this rank does not participate in it."""
        return self._open.get(number)

    def ongoing(self, number: int) -> Context | None:
        """Return a context; None if this rank does not know it yet. Raises CommError if the context has ended."""
        found = self._open.get(number) if isinstance(number, int) else None
        if found is None:
            here = isinstance(number, int) and number >> _RANK_BITS == self._rank
            if here or not isinstance(number, int) or number in self._ended:
                raise CommError(
                    f"there is no autograd context {number!r}: it has ended, or context() never returned it"
                )
        return found

    def discard(self, number: int) -> None:
        """Discard a context that has ended, and notify the ranks to which this rank announced it."""
        with self._lock:
            found = self._open.pop(number, None)
            self._ended[number] = None
            while len(self._ended) > _ENDED_KEPT:
                self._ended.popitem(last=False)
        for peer in found.peers - {self._rank} if found is not None else ():
            self._send(peer, DISCARD, number)

    def lose(self, peer: int) -> None:
        """Discard the contexts that a lost rank opened."""
        for number in list(self._open):
            if number >> _RANK_BITS == peer:
                self.discard(number)

    def backward_from(self, reference: RRef[Any], number: int, retain_graph: bool) -> None:
        """Back-propagate from the tensor that a reference points to, on the tensor's owner."""
        if reference.is_owner():
            start(find(number), [reference.local_value()], retain_graph)
        else:
            rpc_sync(reference.owner(), backward_of, (number, reference, retain_graph))

    # -- recording -----------------------------------------------------------------------------
    def send(self, number: int, peer: int, tensors: list[torch.Tensor]) -> int:
        """Record that a message of the context is sent to a rank, with some tensors that have a history.

        Returns: The message's number; 0 if it needs none, because it has no such tensors or the context has ended.
        """
        context = self.reach(number)
        if context is None:
            return 0
        context.peers.add(peer)
        if not tensors:
            return 0
        message = next(context.numbers)
        context.sent[message] = departure(tensors)
        return message

    def receive(self, number: int, peer: int, message: int, tensor: torch.Tensor) -> torch.Tensor:
        """Record a received tensor with a history. Return the tensor, connected to the sender's graph."""
        context = self.reach(number)
        if context is None or not message or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        with self._lock:
            record = context.received.setdefault((peer, message), RecvRecord(peer, message))
        return arrival(record, tensor)

    def reach(self, number: int) -> Context | None:
        """Return a context, creating it on first use; None if it has ended."""
        if number == NO_CONTEXT:
            return None
        found = self._open.get(number)
        if found is None:
            with self._lock:
                if number not in self._ended:
                    found = self._open.setdefault(number, Context(number, self.leaves))
        return found

    def __repr__(self) -> str:
        return f"<{len(self)} contexts: {', '.join(map(hex, self._open))}>"
