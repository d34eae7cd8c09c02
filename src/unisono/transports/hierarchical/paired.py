"""Transports for several hosts, which combine a transport inside each host with a transport between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from threading import Event
from typing import NoReturn

import torch

from unisono.core.call import Call
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.transport import MESSAGE_CAPABILITIES, FastPath, Mailbox, Options, Transport, share_capabilities
from unisono.core.types import Message, PointToPoint, Work
from unisono.core.work import WorkGroup
from unisono.errors import UnavailableError
from unisono.transports.hierarchical.routing import RankMappedTransport

__all__ = ["Hosts", "Paired", "Pairing", "in_order"]

_POLL_S = 0.01

Hosts = tuple[tuple[int, ...], ...]
"""For each host, its ranks."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """How to make a transport for several hosts.

    Attributes:
        kind: Class that combines two transports.
        control, options: See `Transport.connect`.
        inner: Function that makes the transport among one host's ranks.
        outer: Function that makes the transport among ranks on several hosts.
        reconnect: Function that detects a group's hosts, and makes a transport of the same two kinds for the group.
    """

    kind: type[Paired]
    control: ControlPlane
    options: Options
    inner: Callable[[Group], Transport]
    outer: Callable[[Group], Transport]
    reconnect: Callable[[Group], Transport]

    def connect(self, group: Group, hosts: Hosts) -> Transport:
        """Return the transport for these hosts: inner and outer combined, or only one if that suffices. Collective.

        Args:
            group: All ranks.
            hosts: For each host, its ranks in the group.
        """
        if len(hosts) in (1, group.size):
            single = self.inner(group) if len(hosts) == 1 else self.outer(group)
            # Detect the hosts anew if ranks join later, because this transport may no longer suffice then.
            single.reconnect = self.reconnect
            return single
        return self.kind(group, in_order(hosts), self)


class Paired(Transport):
    """Transport that reaches ranks on this host over the inner transport, and other ranks over the outer transport.

    The outer transport runs all collectives. Use this only for several hosts, at least one of which has several ranks.
    In other cases, one of the two transports suffices, and `Pairing.connect` returns only that one.

    Args:
        group: All ranks.
        hosts: For each host, its ranks in the group.
        pairing: How to make the two transports.
    """

    background = True

    def __init__(self, group: Group, hosts: Hosts, pairing: Pairing) -> None:
        self.group = group
        self._hosts = hosts
        self._pairing = pairing
        self._number = next(number for number, ranks in enumerate(hosts) if group.rank in ranks)
        self._here = hosts[self._number]
        with ExitStack() as undo:
            self._connect(undo)
            self._undo = undo.pop_all()
        self._local_ranks = {rank: local_rank for local_rank, rank in enumerate(self._here)}

    def _connect(self, undo: ExitStack) -> None:
        """Make the transports."""
        pairing = self._pairing
        alone = len(self._here) == 1
        self.inner: Transport | None = (
            None if alone else self._numbered(self._made(pairing.inner, f"host {self._number}", self._here, undo))
        )
        self.outer: Transport = self._made(pairing.outer, "between hosts", range(self.size), undo)
        self._declare()

    def _made(self, kind: Callable[[Group], Transport], name: str, ranks: Sequence[int], undo: ExitStack) -> Transport:
        part = self.group.child(name, ranks)
        control = self._pairing.control
        control.join(part)
        undo.callback(control.leave, part)
        transport = kind(part)
        undo.callback(transport.close)
        return transport

    def _numbered(self, inner: Transport) -> Transport:
        same = self._here == tuple(range(len(self._here)))
        return inner if same else RankMappedTransport(inner, self._here)

    def _declare(self) -> None:
        inner = self.inner
        outer = self.outer
        self.native: frozenset[str] = outer.native
        self.checks: bool = outer.checks
        self.fast_path: FastPath | None = outer.fast_path
        share_capabilities(self, outer, *MESSAGE_CAPABILITIES)
        if inner is not None:
            self.tags = inner.tags and outer.tags
            self.any_source = inner.any_source and outer.any_source
            self.devices = _common(inner, outer)
            self.host_staged = inner.host_staged & self.devices

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        near = [m for m in batch if m.peer in self._local_ranks]
        if self.inner is None or not near:
            return self.outer.post(batch)
        inside = self.inner.post([type(m)(m.tensor, self._local_ranks[m.peer], m.tag) for m in near])
        if len(near) == len(batch):
            return inside
        far = [m for m in batch if m.peer not in self._local_ranks]
        return WorkGroup([inside, self.outer.post(far)], self._pairing.options.timeout_s, _POLL_S)

    def iprobe(self, peer: int, tag: int) -> bool:
        if self.inner is None or peer not in self._local_ranks:
            return self.outer.iprobe(peer, tag)
        return self.inner.iprobe(self._local_ranks[peer], tag)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return super().empty(shape, dtype) if self.inner is None else self.inner.empty(shape, dtype)

    # -- collectives ---------------------------------------------------------------------------
    def supports(self, call: Call) -> bool:
        return self.outer.supports(call)

    def compare(self, call: Call, deadline: float) -> None:
        self.outer.compare(call, deadline)

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        # Pass this transport, so that the messages of a composed call use the inner transport inside a host.
        return self.outer.run(call, over or self)

    # -- subgroups -----------------------------------------------------------------------------
    def split(self, group: Group) -> Transport:
        """Return a transport for a subgroup: a combination of inner and outer, or only one if that suffices."""
        ranks = {member: rank for rank, member in enumerate(self.group.members)}
        chosen = [ranks[member] for member in group.members]
        hosts = tuple(tuple(chosen.index(rank) for rank in chosen if rank in host) for host in self._hosts)
        inner = self.inner.inner if isinstance(self.inner, RankMappedTransport) else self.inner
        outer = self.outer
        pairing = replace(
            self._pairing,
            inner=lambda part: outer.split(part) if inner is None else inner.split(part),
            outer=outer.split,
        )
        return pairing.connect(group, tuple(host for host in hosts if host))

    def mailbox(self, group: Group) -> Mailbox | None:
        # A rank can wait on only one mailbox, and only the outer transport reaches all ranks.
        return self.outer.mailbox(group)

    def reconfigure(self, group: Group) -> Transport:
        """Return a transport for the new group. Detects all ranks' hosts anew, because new ranks may have joined."""
        return self._pairing.reconnect(group)

    def leave(self) -> None:
        for part in self._parts():
            part.leave()

    def simulate_freeze(self, thawed: Event, freeze_s: float | None) -> None:
        self.outer.simulate_freeze(thawed, freeze_s)

    def simulate_crash(self, error: BaseException) -> NoReturn:
        self.outer.simulate_crash(error)

    def close(self) -> None:
        self._undo.close()

    def abort(self, cause: BaseException) -> None:
        for part in self._parts():
            part.abort(cause)

    def _parts(self) -> list[Transport]:
        return [part for part in (self.inner, self.outer) if part is not None]


def in_order(hosts: Hosts) -> Hosts:
    """Sort each host's ranks, and sort hosts by their first ranks, so that the order is the same on all ranks."""
    return tuple(sorted(tuple(sorted(ranks)) for ranks in hosts))


def _common(inner: Transport, outer: Transport) -> frozenset[str]:
    """Return the device types that both transports support in the same way: directly, or staged in CPU memory."""
    both = {
        kind for kind in inner.devices & outer.devices if (kind in inner.host_staged) == (kind in outer.host_staged)
    }
    if not both:
        raise UnavailableError(
            f"{type(inner).__name__} supports tensors on {', '.join(sorted(inner.devices))}, "
            f"{type(outer).__name__} on {', '.join(sorted(outer.devices))}; use two backends for the same devices, "
            "such as 'shm+tcp'"
        )
    return frozenset(both)
