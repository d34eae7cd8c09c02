"""Transport between processes on any hosts over dedicated connections, with algorithms in native code."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.collectives.native_calls import NativeTransport
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.transport import FastPath, Mailbox, Options
from unisono.core.types import Message, Work
from unisono.errors import ClosedError
from unisono.host.network import host_identity
from unisono.host.processors import cores
from unisono.transports.tcp.collectives import TcpCollectives
from unisono.transports.tcp.mailbox import TcpMailbox

__all__ = ["TRANSPORT", "TcpTransport"]


class TcpTransport(NativeTransport):
    """Transport over two connections per pair of ranks, one for collectives and one for messages.

    The connections are set up when the group connects; both ends must prove that they know the job's secret. Traffic is
    neither encrypted nor authenticated, unless UNISONO_TLS is set. The native core runs each collective in one call, in
    which ranks also compare their calls: no output is written until all ranks agree. The core also moves blocking
    messages while no other message is in flight. Reductions for which the core has no kernel are run by algorithms that
    exchange messages. Cost: p - 1 connections of each kind on each rank; about 15 us for a short message on one host.

    Args:
        group, control, options: Arguments of `connect`.
        background: Whether a background thread can run without competing with ranks for processors.
        hosts: For each host, its ranks. Collectives then use shared memory inside each host, and send little data
            between hosts. Empty to use connections between all ranks.
    """

    calls: TcpCollectives
    latency_s: float = TcpCollectives.latency_s
    second_per_byte: float = TcpCollectives.second_per_byte

    def __init__(
        self,
        group: Group,
        control: ControlPlane,
        options: Options,
        *,
        background: bool,
        hosts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.group = group
        self._hosts = hosts
        self._control = control
        self._options = options
        self.background = background
        self._closed = False
        self.calls = TcpCollectives(group, control, options, with_messages=True, hosts=hosts)
        self.fast_path: FastPath | None = self.calls
        assert self.calls.messages is not None
        self._messages = self.calls.messages

    @classmethod
    def connect(
        cls, group: Group, control: ControlPlane, options: Options, hosts: Sequence[Sequence[int]] = ()
    ) -> TcpTransport:
        # Join the group without a failure callback: at first, the membership serves only to exchange values. The
        # communicator joins again, with a callback.
        control.join(group)
        spare = cores() >= group.size * (torch.get_num_threads() + 1)
        values = control.exchange(group, "processors", (host_identity(), spare), options.timeout_s)
        # Between hosts, a background thread mostly waits for the network. On a single host, a background thread would
        # compete with the ranks for processors, unless there are spare processors.
        several = len({host for host, _ in values}) > 1
        return cls(group, control, options, background=several or all(spares for _, spares in values), hosts=hosts)

    def split(self, group: Group) -> TcpTransport:
        # Keep the parent's `background`: a subgroup cannot tell whether ranks outside it need the processors.
        ranks = {member: rank for rank, member in enumerate(group.members)}
        members = self.group.members
        parts = (tuple(ranks[members[r]] for r in host if members[r] in ranks) for host in self._hosts)
        hosts = tuple(part for part in parts if part)
        # If all ranks are on different hosts, use only connections.
        hosts = hosts if len(hosts) < group.size else ()
        return TcpTransport(group, self._control, self._options, background=self.background, hosts=hosts)

    def reconfigure(self, group: Group) -> TcpTransport:
        # Connect anew, because new ranks may have fewer processors.
        return self.connect(group, self._control, self._options)

    def mailbox(self, group: Group) -> Mailbox:
        return TcpMailbox(group, self._control, self._options.address, self._options.timeout_s)

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        return self._messages.post(batch, self._options.timeout_s)

    def iprobe(self, peer: int, tag: int) -> bool:
        return self._messages.holds(peer, tag)

    # -- end -----------------------------------------------------------------------------------
    def leave(self) -> None:
        self.calls.leave()
        self._messages.leave()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.abort(ClosedError("the communicator is closed"))
            self.calls.close()
            self._messages.close()

    def abort(self, cause: BaseException) -> None:
        if self.calls.broken is None:
            self.calls.end(cause)
            self._messages.abort(cause)


TRANSPORT = TcpTransport
