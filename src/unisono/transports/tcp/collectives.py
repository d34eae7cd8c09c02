"""Collectives over TCP connections: the native core runs all steps of a collective's algorithm in one call."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn, Self

from unisono.collectives.native_calls import NativeCalls, Programs, check_builds, known_dtypes
from unisono.control.mesh import say_farewell
from unisono.control.sockets import FAR_S, round_trip_s
from unisono.core.call import Fingerprint
from unisono.core.control import ControlPlane, raise_mismatch
from unisono.core.forks import invalidate_after_fork
from unisono.core.group import Group
from unisono.core.transport import Options
from unisono.host.native import core_build, native
from unisono.host.processors import cores
from unisono.transports.tcp.mailbox import meet
from unisono.transports.tcp.messages import TcpMessages

if TYPE_CHECKING:
    from unisono._native import TcpCore

__all__ = ["TcpCollectives", "connected"]

_SLICE_BYTES = 1 << 20
"""Slice length: this many bytes remain in the cache between two steps."""
_FAR_SLICE_BYTES = 64 << 20
"""Slice length for slow links, on which the latency of each additional slice outweighs any cache miss."""


class TcpCollectives(NativeCalls):
    """Native collectives of one group. Every rank must make the same calls in the same order.

    Each frame contains the call's number, and a hash of its operation, dtype, root, algorithm and lengths. The receiver
    compares both with those of its own call.

    Args:
        group, control, timeout_s: The ranks, their control plane, and their time limit in seconds.
        connections: Non-blocking connections by rank. `close` closes them.
        messages: Point-to-point messages, which use other connections; None if not needed.
        slice_bytes: Length of the slices, in bytes, into which long calls are divided; the same on all ranks.
    """

    core: TcpCore
    latency_s: float = 30e-6
    second_per_byte: float = 5e-10

    def __init__(
        self,
        group: Group,
        control: ControlPlane,
        timeout_s: float,
        connections: Mapping[int, socket.socket],
        messages: TcpMessages | None,
        slice_bytes: int = _SLICE_BYTES,
    ) -> None:
        module = native()
        rank = group.rank
        size = group.size
        assert module is not None
        programs = Programs(module, rank, size, self.latency_s, self.second_per_byte)
        sockets = [connections[peer].fileno() if peer != rank else -1 for peer in range(size)]
        moved = [] if messages is None else messages.sockets(size)
        core = module.TcpCore(rank, sockets, moved, size > cores(), slice_bytes, known_dtypes(), programs.cheapest)
        super().__init__(core, rank, size, programs, messages)
        self._farewell: bytes = module.FAREWELL
        self._group = group
        self._control = control
        self._timeout_s = timeout_s
        self._connections = list(connections.values())
        self.messages = messages
        self.broken: BaseException | None = None
        invalidate_after_fork(self)

    @classmethod
    def connect(cls, group: Group, control: ControlPlane, options: Options, *, with_messages: bool = False) -> Self:
        """Connect all ranks of a group. All must have the same build of the native core. Collective.

        Raises:
            UnavailableError: A rank has no native core.
            CommError: Ranks have different builds of the native core, or cannot reach each other.
        """
        check_builds("tcp", control.exchange(group, "builds of the core", core_build(), options.timeout_s))
        messages = None
        if with_messages:
            messages = TcpMessages(group.rank, connected(group, control, options, "messages"))
        connections = connected(group, control, options, "calls")
        farthest_s = max(map(round_trip_s, connections.values()), default=0.0)
        is_far = max(control.exchange(group, "round trips", farthest_s, options.timeout_s)) >= FAR_S
        slice_bytes = _FAR_SLICE_BYTES if is_far else _SLICE_BYTES
        return cls(group, control, options.timeout_s, connections, messages, slice_bytes)

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """Implement `FastPath`."""
        topic = f"mismatch in call {self.core.number}"
        raise_mismatch(self._control, self._group, topic, fingerprint, self._timeout_s)

    def leave(self) -> None:
        """Send farewells to the other ranks. If a connection ends without a farewell, its rank counts as lost."""
        for connection in self._connections if self.broken is None else ():
            # The other end may already be gone.
            with contextlib.suppress(OSError):
                connection.send(self._farewell)
                connection.shutdown(socket.SHUT_WR)

    def end(self, cause: BaseException) -> None:
        """End every current and later wait with an error. May be called from any thread."""
        self.broken = cause
        self.abort()

    def close(self) -> None:
        """Close the connections. No call may be in progress."""
        say_farewell(self._connections, self.broken)
        self.invalidate_after_fork()

    def invalidate_after_fork(self) -> None:
        """Close the connections in a forked child."""
        for connection in self._connections:
            connection.close()

    def _cause(self) -> BaseException | None:
        return self.broken


def connected(group: Group, control: ControlPlane, options: Options, topic: str) -> dict[int, socket.socket]:
    """Connect to every other rank. Joins the group. Collective.

    Raises:
        CommError: Ranks cannot reach each other. Raised on every rank.
    """
    links = meet(group, control, options.address, options.timeout_s, topic)
    return {peer: connection for peer, (connection, _) in links.items()}
