"""Finds transports, and pairs of transports, by name, and detects hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.transport import Options, Transport
from unisono.transports import TRANSPORTS
from unisono.transports.hierarchical.paired import Hosts, Paired, Pairing, in_order

__all__ = ["Connectable", "TransportPair", "find_hosts", "transport_named"]


@dataclass(frozen=True, slots=True)
class TransportPair:
    """Pair of transports, given by name, which has the same `connect` method as a transport class.

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
        found = options.hosts or find_hosts(self.inner, group, control, options.timeout_s)
        if sorted(rank for ranks in found for rank in ranks) != list(range(group.size)):
            named = [list(ranks) for ranks in found]
            raise ValueError(f"hosts={named} must name each of the ranks 0 to {group.size - 1} once")
        hosts = in_order(found)
        outer = partial(TRANSPORTS[self.outer].connect, control=control, options=replace(options, backend=self.outer))
        if (self.inner, self.outer) == ("shm", "tcp") and len(hosts) < group.size:
            # All collectives run on the outer transport, which uses shared memory inside hosts.
            outer = partial(outer, hosts=hosts)
        pairing = Pairing(
            self._kind(),
            control,
            options,
            inner=lambda part: TRANSPORTS[self.inner].connect(part, control, replace(options, backend=self.inner)),
            outer=outer,
            reconnect=lambda new: self.connect(new, control, replace(options, hosts=None)),
        )
        return pairing.connect(group, hosts)

    def _kind(self) -> type[Paired]:
        """Return the class that combines the two transports."""
        if self.outer == "tcp":
            return Paired
        # Import these classes only here: launchers load this module, and most programs need no pair of transports.
        if self.inner == "shm":
            from unisono.transports.hierarchical.compared import ComparedHierarchical

            return ComparedHierarchical
        from unisono.transports.hierarchical.composed import Hierarchical

        return Hierarchical


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
