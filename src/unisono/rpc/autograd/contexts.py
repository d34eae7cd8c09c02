"""Autograd contexts: which tensors were sent to which rank, so that gradients can be returned."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable

import torch

from unisono.errors import CommError
from unisono.rpc.autograd.backward_pass import Context
from unisono.rpc.autograd.functions import RecvRecord, arrival, departure
from unisono.rpc.autograd.leaves import Leaves
from unisono.rpc.protocol import DISCARD, NO_CONTEXT

__all__ = ["Contexts"]

_RANK_BITS = 48
_ENDED_KEPT = 4096


class Contexts:
    """Contexts known to an agent.

    Args:
        rank: This rank.
        send: Sends a message of a few numbers to a rank.

    Attributes:
        leaves: Leaves of all contexts.
    """

    def __init__(self, rank: int, send: Callable[..., None]) -> None:
        self._rank, self._send = rank, send
        self._lock = threading.Lock()
        self.leaves = Leaves()
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
        """Return a context that this rank takes part in; None if there is none."""
        return self._open.get(number)

    def ongoing(self, number: int) -> Context | None:
        """Return a context; None if this rank does not know it yet. Raises CommError if it has ended."""
        found = self._open.get(number) if isinstance(number, int) else None
        if found is None:
            here = isinstance(number, int) and number >> _RANK_BITS == self._rank
            if here or not isinstance(number, int) or number in self._ended:
                raise CommError(
                    f"there is no autograd context {number!r}: it has ended, or context() never returned it"
                )
        return found

    def discard(self, number: int) -> None:
        """Forget a context that has ended, and notify the ranks that learned of it from this rank."""
        with self._lock:
            found = self._open.pop(number, None)
            self._ended[number] = None
            while len(self._ended) > _ENDED_KEPT:
                self._ended.popitem(last=False)
        for peer in found.peers - {self._rank} if found is not None else ():
            self._send(peer, DISCARD, number)

    def lose(self, peer: int) -> None:
        """Discard the contexts that a lost rank began."""
        for number in list(self._open):
            if number >> _RANK_BITS == peer:
                self.discard(number)

    # -- recording -----------------------------------------------------------------------------
    def met(self, number: int, peer: int) -> None:
        """Record that a message of the context is sent to a rank."""
        context = self.reach(number)
        if context is not None:
            context.peers.add(peer)

    def send(self, number: int, peer: int, tensors: list[torch.Tensor]) -> int:
        """Record tensors with a history that are sent to a rank. Return the number of their message."""
        context = self.reach(number)
        if context is None:
            return 0
        message = next(context.numbers)
        context.sent[message] = departure(tensors)
        return message

    def receive(self, number: int, peer: int, message: int, tensor: torch.Tensor) -> torch.Tensor:
        """Record a received tensor with a history. Return it connected to its sender's graph."""
        context = self.reach(number)
        if context is None or not message or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        with self._lock:
            record = context.received.setdefault((peer, message), RecvRecord(peer, message))
        return arrival(record, tensor)

    def reach(self, number: int) -> Context | None:
        """Return a context, created on first use; None if it has ended."""
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
