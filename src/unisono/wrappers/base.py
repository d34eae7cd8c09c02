"""Base class of all wrappers: a transport that forwards every call to another transport."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from threading import Event
from typing import NoReturn, Self

import torch

from unisono.core.call import Call
from unisono.core.group import Group
from unisono.core.transport import MESSAGE_CAPABILITIES, Transport, renewed, share_capabilities
from unisono.core.types import Message, PointToPoint, Work

__all__ = ["Wrapper"]


class Wrapper(Transport):
    """Forwards every call except native collectives, because these would bypass a wrapper that intercepts `post`.

    A wrapper that can handle native collectives copies `native` from the inner transport. A subclass overrides the
    methods that it changes, and `wrap_child`, which wraps the transports of subgroups.

    Args:
        inner: The transport to wrap.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.group: Group = inner.group
        share_capabilities(self, inner, "checks", "full", "balanced", *MESSAGE_CAPABILITIES)

    @abstractmethod
    def wrap_child(self, inner: Transport) -> Self:
        """Return a wrapper with the same settings around another group's transport.

        Args:
            inner: Result of the inner transport's `split` or `reconfigure`.
        """

    def split(self, group: Group) -> Transport:
        return self.wrap_child(self.inner.split(group))

    def reconfigure(self, group: Group) -> Transport:
        return self.wrap_child(renewed(self.inner, group))

    def post(self, batch: Sequence[Message]) -> Work:
        return self.inner.post(batch)

    def iprobe(self, peer: int, tag: int) -> bool:
        return self.inner.iprobe(peer, tag)

    def supports(self, call: Call) -> bool:
        return call.name in self.native and self.inner.supports(call)

    def compare(self, call: Call, deadline: float) -> None:
        self.inner.compare(call, deadline)

    def settle(self) -> None:
        self.inner.settle()

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        return self.inner.run(call, over or self)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.inner.empty(shape, dtype)

    def leave(self) -> None:
        self.inner.leave()

    def close(self) -> None:
        self.inner.close()

    def abort(self, cause: BaseException) -> None:
        self.inner.abort(cause)

    def simulate_freeze(self, thawed: Event, freeze_s: float | None) -> None:
        self.inner.simulate_freeze(thawed, freeze_s)

    def simulate_crash(self, error: BaseException) -> NoReturn:
        self.inner.simulate_crash(error)
