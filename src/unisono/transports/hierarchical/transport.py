"""Transports for several hosts, which combine a transport inside each host with a transport between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import NoReturn

import torch

from unisono.core import clock
from unisono.core.call import Call
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.transport import MESSAGE_CAPABILITIES, Mailbox, Options, Transport, share_capabilities
from unisono.core.types import Message, PointToPoint, Work
from unisono.core.work import Deferred
from unisono.errors import ClosedError, CommTimeoutError, UnavailableError
from unisono.transports import TRANSPORTS
from unisono.transports.hierarchical.collectives import HierarchicalCollectives
from unisono.transports.hierarchical.consistency import HostAgreement
from unisono.transports.hierarchical.host_links import meet
from unisono.transports.hierarchical.routing import RankMappedTransport, Routes, SubsetCollectives, SubsetTransport

__all__ = ["Connectable", "Hierarchical", "Hosts", "TransportPair", "find_hosts", "over", "transport_named"]

Hosts = tuple[tuple[int, ...], ...]
"""For each host, its ranks."""

_SHORT_BYTES = 128 << 10
_SHORT_PART = 16
"""Short reductions have at most `_SHORT_BYTES`, and at most `chunk_bytes` divided by this number."""

_ANYWHERE = frozenset({"all_reduce", "barrier", "broadcast", "reduce"})
_IF_EVEN = frozenset({"all_gather", "reduce_scatter"})


class Hierarchical(Transport):
    """Transport that reaches ranks on this host over the inner transport, and other ranks over the outer transport.

    Collectives combine both transports, or are composed of messages. Before each collective, all ranks compare their
    calls over dedicated links. An all_reduce of up to 128 KiB (less with more than two hosts) travels in the packets of
    this comparison. Use this only for several hosts of which at least one has several ranks. In other cases, one of the
    two transports suffices, and `over` returns only that one.

    Args:
        group: All ranks.
        control: This rank's handle to the control plane.
        options: The `Options` that were passed to `connect`.
        hosts: For each host, its ranks in the group.
        inner: Function that makes the transport among this host's ranks. Called only if the host has several ranks.
        outer: Function that makes the transport among all ranks.
        reconnect: Function that makes a transport with the same inner and outer kinds for a different set of ranks,
            without reusing this transport.
    """

    checks = True
    background = True

    def __init__(
        self,
        group: Group,
        control: ControlPlane,
        options: Options,
        hosts: Hosts,
        inner: Callable[[Group], Transport],
        outer: Callable[[Group], Transport],
        reconnect: Callable[[Group], Transport],
    ) -> None:
        self._reconnect = reconnect
        self.group = group
        self._control = control
        self._options = options
        self._hosts = hosts
        self._broken: BaseException | None = None
        here = next(number for number, ranks in enumerate(hosts) if group.rank in ranks)
        self._here = hosts[here]
        with ExitStack() as undo:
            self._links = meet(group, control, hosts, options.address, options.timeout_s)
            if self._links is not None:
                undo.callback(self._links.close)

            def made(kind: Callable[[Group], Transport], name: str, ranks: Sequence[int]) -> Transport:
                part = group.child(name, ranks)
                control.join(part)
                undo.callback(control.leave, part)
                transport = kind(part)
                undo.callback(transport.close)
                return transport

            self.inner: Transport | None = (
                self._numbered(made(inner, f"host {here}", self._here)) if len(self._here) > 1 else None
            )
            self.outer: Transport = made(outer, "between hosts", range(group.size))
            self._rail: Transport | None = None
            place = self._here.index(group.rank)
            if place < min(map(len, hosts)):
                ranks = [ranks[place] for ranks in hosts]
                native = self.outer.checks and "all_reduce" in self.outer.native
                self._rail = (
                    made(self.outer.split, f"rail {place}", ranks) if native else SubsetTransport(self.outer, ranks)
                )
            self._declare()
            self._undo = undo.pop_all()
        chunk_bytes = options.chunk_bytes
        timeout_s = options.timeout_s
        inside = SubsetCollectives(self.inner, chunk_bytes) if self.inner is not None else None
        short = min(_SHORT_BYTES, chunk_bytes // _SHORT_PART)
        self._routes = Routes(self.inner, self.outer, self._here, timeout_s)
        self._agreement = HostAgreement(group, control, len(hosts), inside, self._links, here, short, timeout_s)
        self._bulk = HierarchicalCollectives(self.outer, inside, self._rail, hosts, chunk_bytes, timeout_s)

    def _numbered(self, inner: Transport) -> Transport:
        same = self._here == tuple(range(len(self._here)))
        return inner if same else RankMappedTransport(inner, self._here)

    def _declare(self) -> None:
        inner = self.inner
        outer = self.outer
        even = len({len(ranks) for ranks in self._hosts}) == 1
        self.native: frozenset[str] = _ANYWHERE | _IF_EVEN if even else _ANYWHERE
        share_capabilities(self, outer, *MESSAGE_CAPABILITIES)
        if inner is not None:
            self.tags = inner.tags and outer.tags
            self.any_source = inner.any_source and outer.any_source
            self.devices = _common(inner, outer)
            self.host_staged = inner.host_staged & self.devices

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        return self._routes.post(batch)

    def iprobe(self, peer: int, tag: int) -> bool:
        return self._routes.iprobe(peer, tag)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return super().empty(shape, dtype) if self.inner is None else self.inner.empty(shape, dtype)

    # -- collectives ---------------------------------------------------------------------------
    def compare(self, call: Call, deadline: float) -> None:
        """Check that all ranks make the same call, if it is composed of messages; `run` checks native calls itself."""
        if call.steps is not None:
            with self._name_missing_rank(deadline):
                self._agreement.compare(call.fingerprint, deadline)

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        if call.steps is not None:
            return super().run(call, over)
        return Deferred(partial(self._run, call), call.timeout)

    def _run(self, call: Call, deadline: float) -> None:
        with self._name_missing_rank(deadline):
            if call.name == "all_reduce" and call.outputs[0].nbytes <= self._agreement.short_bytes:
                self._agreement.reduce(call, deadline)
                return
            self._agreement.compare(call.fingerprint, deadline)
            if call.name != "barrier":
                getattr(self._bulk, call.name)(call, deadline)

    @contextmanager
    def _name_missing_rank(self, deadline: float) -> Iterator[None]:
        """Name the late rank in timeout errors, since a rank that waits for another host cannot identify it."""
        timeout = deadline - clock.now()
        try:
            yield
        except CommTimeoutError as error:
            if self._broken is not None:
                raise self._broken from error
            raise self._agreement.find_missing_rank(error, timeout) from error

    # -- subgroups -----------------------------------------------------------------------------
    def split(self, group: Group) -> Transport:
        """Return a transport for a subgroup: a combination of inner and outer, or only one if that suffices."""
        ranks = {member: rank for rank, member in enumerate(self.group.members)}
        chosen = [ranks[member] for member in group.members]
        hosts = tuple(tuple(chosen.index(rank) for rank in chosen if rank in host) for host in self._hosts)
        inner = self.inner
        outer = self.outer
        return over(
            group,
            self._control,
            self._options,
            tuple(host for host in hosts if host),
            inner=lambda part: outer.split(part) if inner is None else _bare(inner).split(part),
            outer=outer.split,
            reconnect=self._reconnect,
        )

    def mailbox(self, group: Group) -> Mailbox | None:
        # A rank can wait on only one mailbox, and only the outer transport reaches all ranks.
        return self.outer.mailbox(group)

    def reconfigure(self, group: Group) -> Transport:
        """Return a transport for the new group. Detects all ranks' hosts anew, because new ranks may have joined."""
        return self._reconnect(group)

    def leave(self) -> None:
        for part in self._parts():
            part.leave()

    def simulate_freeze(self, thawed: Event, freeze_s: float | None) -> None:
        self.outer.simulate_freeze(thawed, freeze_s)

    def simulate_crash(self, error: BaseException) -> NoReturn:
        self.outer.simulate_crash(error)

    def close(self) -> None:
        self._end(ClosedError("the communicator is closed"))
        self._undo.close()

    def abort(self, cause: BaseException) -> None:
        self._end(cause)
        for part in self._parts():
            part.abort(cause)

    def _parts(self) -> list[Transport]:
        return [part for part in (self.inner, self._rail, self.outer) if part is not None]

    def _end(self, cause: BaseException) -> None:
        self._broken = self._broken or cause
        if self._links is not None:
            self._links.abort(cause)


def over(
    group: Group,
    control: ControlPlane,
    options: Options,
    hosts: Hosts,
    inner: Callable[[Group], Transport],
    outer: Callable[[Group], Transport],
    reconnect: Callable[[Group], Transport],
) -> Transport:
    """Return the transport for these hosts: inner and outer combined, or only one if that suffices. Collective.

    Args:
        group: All ranks.
        control, options: This rank's handle to the control plane, and its options.
        hosts: For each host, its ranks in the group.
        inner: Function that makes the transport among one host's ranks.
        outer: Function that makes the transport among ranks on several hosts.
        reconnect: Function that makes a transport with the same inner and outer kinds for ranks whose hosts are
            unknown.
    """
    if len(hosts) in (1, group.size):
        single = inner(group) if len(hosts) == 1 else outer(group)
        # If ranks join later, this transport may no longer suffice, so detect the hosts anew then.
        single.reconnect = reconnect
        return single
    return Hierarchical(group, control, options, _in_order(hosts), inner, outer, reconnect)


def _in_order(hosts: Hosts) -> Hosts:
    """Sort each host's ranks, and sort hosts by their first ranks, so that the order is the same on all ranks."""
    return tuple(sorted(tuple(sorted(ranks)) for ranks in hosts))


def _bare(inner: Transport) -> Transport:
    return inner.inner if isinstance(inner, RankMappedTransport) else inner


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


@dataclass(frozen=True, slots=True)
class TransportPair:
    """Names of two transports, with a `connect` method like that of a transport class.

    Attributes:
        inner: Name of the transport inside each host.
        outer: Name of the transport between hosts.
    """

    inner: str
    outer: str

    @property
    def simulated(self) -> bool:
        """Whether the ranks take turns on a virtual clock."""
        return TRANSPORTS[self.inner].simulated or TRANSPORTS[self.outer].simulated

    @property
    def in_process(self) -> bool:
        """Whether the ranks are threads of one process."""
        return TRANSPORTS[self.inner].in_process or TRANSPORTS[self.outer].in_process

    @property
    def launcher(self) -> str:
        """The launcher that one of the transports requires; if none does, the default launcher."""
        launchers = [TRANSPORTS[name].launcher for name in (self.inner, self.outer)]
        return next((launcher for launcher in launchers if launcher != Transport.launcher), Transport.launcher)

    def connect(self, group: Group, control: ControlPlane, options: Options) -> Transport:
        """Connect like `Transport.connect`. Detects hosts unless the options specify them."""
        hosts = options.hosts or find_hosts(self.inner, group, control, options.timeout_s)
        return over(
            group,
            control,
            options,
            _within(hosts, group.size),
            lambda part: TRANSPORTS[self.inner].connect(part, control, replace(options, backend=self.inner)),
            lambda part: TRANSPORTS[self.outer].connect(part, control, replace(options, backend=self.outer)),
            lambda new: self.connect(new, control, replace(options, hosts=None)),
        )


Connectable = type[Transport] | TransportPair
"""Return type of `transport_named`."""


def transport_named(name: str) -> Connectable:
    """Return the transport class with this name, or a `TransportPair` for a name such as "shm+tcp".

    Raises:
        ValueError: There is no such transport; the message lists the known transports.

    Example:
        >>> transport_named("shm+gloo")
        TransportPair(inner='shm', outer='gloo')
        >>> transport_named("shm+glue")
        Traceback (most recent call last):
        ...
        ValueError: unknown transport 'glue'; known: ...
    """
    inner, plus, outer = name.partition("+")
    if not plus:
        return TRANSPORTS[name]
    for part in (inner, outer):
        TRANSPORTS[part]
    return TransportPair(inner, outer)


def find_hosts(name: str, group: Group, control: ControlPlane, timeout: float) -> Hosts:
    """Detect hosts: return the sets of ranks within which the named transport is known to work. Collective."""
    control.join(group)
    return TRANSPORTS[name].shm_peers(group, control, timeout)


def _within(hosts: Hosts, size: int) -> Hosts:
    """Return the hosts if they contain each rank below `size` once; otherwise raise ValueError."""
    if sorted(rank for ranks in hosts for rank in ranks) != list(range(size)):
        raise ValueError(f"hosts={[list(ranks) for ranks in hosts]} must name each of the ranks 0 to {size - 1} once")
    return tuple(tuple(ranks) for ranks in hosts)
