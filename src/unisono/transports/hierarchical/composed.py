"""Transport whose collectives combine two other transports."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from unisono.core.call import Call
from unisono.core.transport import Transport
from unisono.core.types import PointToPoint, Work
from unisono.core.work import Deferred
from unisono.transports.hierarchical.collectives import HierarchicalCollectives
from unisono.transports.hierarchical.paired import Paired
from unisono.transports.hierarchical.routing import SubsetCollectives, SubsetTransport

__all__ = ["Hierarchical"]

_ANYWHERE = frozenset({"all_reduce", "broadcast", "reduce"})
_IF_EVEN = frozenset({"all_gather", "reduce_scatter"})


class Hierarchical(Paired):
    """Pair of transports for several hosts. Its collectives combine both, or are composed of messages.

    Before each collective, ranks compare their calls as on the outer transport.
    """

    def _connect(self, undo: ExitStack) -> None:
        super()._connect(undo)
        hosts = self._hosts
        options = self._pairing.options
        self._rail: Transport | None = None
        place = self._here.index(self.rank)
        if place < min(map(len, hosts)):
            ranks = [ranks[place] for ranks in hosts]
            native = self.outer.checks and "all_reduce" in self.outer.native
            self._rail = (
                self._made(self.outer.split, f"rail {place}", ranks, undo)
                if native
                else SubsetTransport(self.outer, ranks)
            )
        inside = SubsetCollectives(self.inner, options.chunk_bytes) if self.inner is not None else None
        self._bulk = HierarchicalCollectives(self.outer, inside, self._rail, hosts, options.chunk_bytes)
        undo.callback(self._bulk.worker.end)

    def _declare(self) -> None:
        super()._declare()
        even = len({len(ranks) for ranks in self._hosts}) == 1
        self.native = (_ANYWHERE | _IF_EVEN if even else _ANYWHERE) | (self.outer.native & {"barrier"})
        self.fast_path = None

    def supports(self, call: Call) -> bool:
        return call.name in self.native and not call.lengths

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        if call.steps is not None:
            return Deferred(partial(call.steps, over or self, call), call.timeout)
        if call.name == "barrier":
            return self.outer.run(call)
        return Deferred(partial(self.compose, call), call.timeout)

    def compose(self, call: Call, deadline: float) -> None:
        """Run a call that all ranks have agreed on, composed of calls on the inner and the outer transport."""
        getattr(self._bulk, call.name)(call, deadline)

    def _parts(self) -> list[Transport]:
        return [*super()._parts(), *([] if self._rail is None else [self._rail])]
