"""Shared memory paired with a transport other than tcp. The ranks compare their calls in tcp's native core."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from unisono.core.call import Call
from unisono.core.types import PointToPoint, Work
from unisono.core.work import Deferred
from unisono.transports.hierarchical.composed import Hierarchical
from unisono.transports.tcp.collectives import TcpCollectives

__all__ = ["ComparedHierarchical"]

_SHORT_BYTES = 128 << 10
"""Size up to which an all_reduce is faster over the links for comparing calls than over the pair of transports."""


class ComparedHierarchical(Hierarchical):
    """Hierarchical transport whose ranks compare calls over rings inside hosts and dedicated sockets between hosts.

    Barriers and short reductions of CPU tensors travel over the same links.
    """

    def _connect(self, undo: ExitStack) -> None:
        control = self._pairing.control
        part = self.group.child("calls", range(self.size))
        control.join(part)
        undo.callback(control.leave, part)
        self._calls = TcpCollectives(part, control, self._pairing.options, hosts=self._hosts)
        undo.callback(self._calls.close)
        super()._connect(undo)

    def _declare(self) -> None:
        super()._declare()
        self.native |= {"barrier"}
        self.checks = True

    def compare(self, call: Call, deadline: float) -> None:
        """Compare calls that are composed of messages; `run` compares the others."""
        if call.steps is not None:
            self._calls.compare(call.fingerprint, deadline)

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        if call.steps is not None:
            return super().run(call, over)
        return Deferred(partial(self._run, call), call.timeout)

    def _run(self, call: Call, deadline: float) -> None:
        tensors = call.outputs
        short = call.name == "all_reduce" and tensors[0].nbytes <= _SHORT_BYTES and tensors[0].device.type == "cpu"
        if call.name == "barrier" or (short and self._calls.carries(call)):
            self._calls.carry(call, deadline)
        else:
            self._calls.compare(call.fingerprint, deadline)
            self.compose(call, deadline)

    def leave(self) -> None:
        self._calls.leave()
        super().leave()

    def abort(self, cause: BaseException) -> None:
        self._calls.end(cause)
        super().abort(cause)
