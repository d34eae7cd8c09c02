"""Collectives over TCP connections: the native core runs all steps of a collective's algorithm in one call."""

from __future__ import annotations

import contextlib
import io
import mmap
import socket
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self

from unisono.collectives.native_calls import NativeCalls, Programs, check_builds, known_dtypes
from unisono.control.mesh import say_farewell
from unisono.control.sockets import FAR_S, round_trip_s
from unisono.core.call import Fingerprint
from unisono.core.control import ControlPlane, raise_mismatch
from unisono.core.forks import invalidate_after_fork
from unisono.core.group import Group
from unisono.core.transport import Options
from unisono.errors import CommError, CommTimeoutError
from unisono.host.native import core_build, native
from unisono.host.processors import cores
from unisono.transports.shm.segment import PAGE_BYTES, map_shared, open_pipes
from unisono.transports.tcp.mailbox import meet
from unisono.transports.tcp.messages import TcpMessages

if TYPE_CHECKING:
    from unisono._native import TcpCore

__all__ = ["TcpCollectives", "connected"]

_SLICE_BYTES = 1 << 20
"""Slice length: this many bytes remain in the cache between two steps."""
_FAR_SLICE_BYTES = 64 << 20
"""Slice length for slow links, on which the latency of each additional slice outweighs any cache miss."""

_MISSING_RANK_S = 0.5, 5.0
"""Shortest and longest wait for the other ranks, after a timeout, to find out which of them are missing."""


class TcpCollectives(NativeCalls):
    """Native collectives of one group. Every rank must make the same calls in the same order.

    Each frame contains the call's number, and a hash of its operation, dtype, root, algorithm and lengths. The receiver
    compares both with its own. Between ranks that share a host, frames may travel through shared memory.

    Args:
        group, control, options: See `Transport.connect`. All ranks must have the same build of the native core.
        with_messages: Whether the core also moves point-to-point messages, on other connections.
        hosts: For each host, its ranks, which can map each other's memory; empty to connect all ranks. With hosts, the
            core moves no messages, because messages inside a host use another transport.

    Raises:
        UnavailableError: A rank has no native core.
        CommError: Ranks have different builds of the native core, or cannot reach each other.

    Attributes:
        messages: The point-to-point messages, or None.
        broken: Error passed to `end`; None while calls can still be made.
    """

    core: TcpCore
    latency_s: float = 30e-6
    second_per_byte: float = 5e-10

    def __init__(
        self,
        group: Group,
        control: ControlPlane,
        options: Options,
        *,
        with_messages: bool = False,
        hosts: Sequence[Sequence[int]] = (),
    ) -> None:
        timeout_s = options.timeout_s
        rank = group.rank
        size = group.size
        check_builds("tcp", control.exchange(group, "builds of the core", core_build(), timeout_s))
        messages = TcpMessages(rank, connected(group, control, options, "messages")) if with_messages else None
        near = next((ranks for ranks in hosts if rank in ranks), ())
        # Resources that the ranks on this host share; None if this rank is alone there.
        shared = _Shared.of(group.child(f"rings of {near[0]}", near), control, timeout_s) if near[1:] else None
        connections = connected(group, control, options, "calls", near)
        farthest_s = max(map(round_trip_s, connections.values()), default=0.0)
        is_far = max(control.exchange(group, "round trips", farthest_s, timeout_s)) >= FAR_S
        module = native()
        assert module is not None
        programs = Programs(module, rank, size, self.latency_s, self.second_per_byte, hosts)
        sockets = [connections[peer].fileno() if peer in connections else -1 for peer in range(size)]
        moved = [] if messages is None else messages.sockets(size)
        self._bells = [] if shared is None else shared.bells
        memory = bytearray() if shared is None else memoryview(shared.memory)[PAGE_BYTES:]
        rings = module.Hosts(list(map(list, hosts)), memory, [bell.fileno() for bell in self._bells])
        slice_bytes = _FAR_SLICE_BYTES if is_far else _SLICE_BYTES
        core = module.TcpCore(
            rank, sockets, moved, size > cores(), slice_bytes, known_dtypes(), programs.cheapest, rings
        )
        super().__init__(core, rank, size, programs, None if hosts else messages)
        self._part = None if shared is None else shared.part
        self._hosts = hosts
        self._near = near
        self._group = group
        self._control = control
        self._timeout_s = timeout_s
        self._connections = list(connections.values())
        self.messages = messages
        self.broken: BaseException | None = None
        invalidate_after_fork(self)

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """Implement `FastPath`."""
        topic = f"mismatch in call {self.core.number}"
        raise_mismatch(self._control, self._group, topic, fingerprint, self._timeout_s)

    def _late(self, waited_s: float, missing: int) -> CommError:
        error = super()._late(waited_s, missing)
        if not self._hosts:
            return error
        # Find out which rank is missing, because `missing` may itself wait for a rank on another host. The topic omits
        # the call's number, because some of the waiting ranks may already have completed the call in which the others
        # wait.
        shortest, longest = _MISSING_RANK_S
        topic = "the consistency check of a call"
        try:
            self._control.exchange(self._group, topic, None, min(max(waited_s, shortest), longest))
        except CommTimeoutError as named:
            if named.peer is not None:
                return named
            # The error names no rank: the control plane did not answer.
            if missing in self._near:
                text = f"waited {waited_s:.1f} s for rank {missing}, which may itself wait for a rank on another host"
                return CommTimeoutError(text, waited_s=waited_s)
            return error
        except CommError as first:
            return first
        return error

    def leave(self) -> None:
        """Send farewells to the other ranks. If a connection ends without a farewell, its rank counts as lost."""
        if self.broken is not None:
            return
        self.core.leave()
        for connection in self._connections:
            # Ignore errors: the peer may already have closed the connection.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def end(self, cause: BaseException) -> None:
        """End every current and later wait with an error. May be called from any thread."""
        self.broken = cause
        self.abort()

    def close(self) -> None:
        """Close the connections. No call may be in progress."""
        say_farewell(self._connections, self.broken)
        self.invalidate_after_fork()
        if self._part is not None:
            self._control.leave(self._part)

    def invalidate_after_fork(self) -> None:
        """Close the connections in a forked child."""
        for connection in self._connections:
            connection.close()
        for bell in self._bells:
            bell.close()

    def _cause(self) -> BaseException | None:
        return self.broken


class _Shared(NamedTuple):
    """Resources that the ranks on one host share: memory for rings, and a doorbell per rank.

    Attributes:
        part: The ranks, as a group that this rank has joined.
        memory, bells: The mapped memory, and the pipes that are the doorbells.
    """

    part: Group
    memory: mmap.mmap
    bells: list[io.FileIO]

    @classmethod
    def of(cls, part: Group, control: ControlPlane, timeout_s: float) -> Self:
        """Join the group, and open the resources that its ranks share. Collective."""
        module = native()
        assert module is not None
        control.join(part)
        try:
            nbytes = PAGE_BYTES + module.Hosts.nbytes(part.size)
            memory = map_shared(part, control, "rings", nbytes, timeout_s, mmap.mmap)
            return cls(part, memory, open_pipes(part, control, "doorbells", timeout_s))
        except BaseException:
            control.leave(part)
            raise


def connected(
    group: Group, control: ControlPlane, options: Options, topic: str, apart: Collection[int] = ()
) -> dict[int, socket.socket]:
    """Connect to every other rank, except the ranks `apart`. Joins the group. Collective.

    Raises:
        CommError: Ranks cannot reach each other. Raised on every rank.
    """
    links = meet(group, control, options.address, options.timeout_s, topic, apart)
    return {peer: connection for peer, (connection, _) in links.items()}
