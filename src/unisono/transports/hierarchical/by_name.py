"""Two transports by one name, "inner+outer": the inner one within each host, the outer one between hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.transport import Options, Transport
from unisono.transports import TRANSPORTS
from unisono.transports.hierarchical.transport import Hosts, over

__all__ = ["Connectable", "Pair", "find_hosts", "transport_named"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Pair of transports, with the `connect` of a transport class.

    Attributes:
        inner: The name of the transport within a host.
        outer: The name of the transport between hosts.
    """

    inner: str
    outer: str

    @property
    def simulated(self) -> bool:
        """Return whether the ranks take turns on a virtual clock."""
        return TRANSPORTS[self.inner].simulated or TRANSPORTS[self.outer].simulated

    @property
    def in_process(self) -> bool:
        """Return whether ranks are threads of one process."""
        return TRANSPORTS[self.inner].in_process or TRANSPORTS[self.outer].in_process

    @property
    def launcher(self) -> str:
        """The launcher that starts the ranks: the one that either transport needs."""
        launchers = [TRANSPORTS[name].launcher for name in (self.inner, self.outer)]
        return next((launcher for launcher in launchers if launcher != Transport.launcher), Transport.launcher)

    def connect(self, group: Group, control: ControlPlane, options: Options) -> Transport:
        """As `Transport.connect`. The options name the ranks of each host; otherwise they are detected."""
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


Connectable = type[Transport] | Pair
"""Return type of `transport_named`."""


def transport_named(name: str) -> Connectable:
    """Return a transport of the registry, or a pair of them.

    Raises:
        ValueError: There is no such transport; lists the known ones.

    Example:
        >>> transport_named("shm+gloo")
        Pair(inner='shm', outer='gloo')
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
    return Pair(inner, outer)


def find_hosts(name: str, group: Group, control: ControlPlane, timeout: float) -> Hosts:
    """Return, for each host, the ranks that a transport of this name can prove to connect there. Collective."""
    control.join(group)
    return TRANSPORTS[name].shm_peers(group, control, timeout)


def _within(hosts: Hosts, size: int) -> Hosts:
    """Return the hosts, if they consist of these ranks."""
    if sorted(rank for ranks in hosts for rank in ranks) != list(range(size)):
        raise ValueError(f"hosts={[list(ranks) for ranks in hosts]} must name each of the ranks 0 to {size - 1} once")
    return tuple(tuple(ranks) for ranks in hosts)
