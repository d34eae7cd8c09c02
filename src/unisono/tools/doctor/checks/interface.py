"""Check which network interface connects this host to the other hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator

from unisono.host.network import (
    address_of,
    address_outward,
    address_towards,
    interface_of,
    is_loopback,
    requested_interface,
)
from unisono.tools.doctor.examination import Finding, Target, info, ok, problem
from unisono.tools.doctor.network import addresses

__all__ = ["ORDER", "check"]

ORDER = 51
_NCCL = "NCCL_SOCKET_IFNAME"


def check(target: Target) -> Iterator[Finding]:
    """Report the interface that the user chose, or else the one on the route to the first host or the default route."""
    wanted = requested_interface()
    if wanted is None:
        yield _way(target)
        if os.environ.get(_NCCL):
            yield problem(f"{_NCCL} {os.environ[_NCCL]} fits no interface of this host", f"unset {_NCCL}")
        return
    name, variable = wanted
    try:
        yield ok(f"{address_of(*wanted)} of {name}, which {variable} names")
    except ValueError as error:
        yield problem(str(error), f"unset {variable}")


def _way(target: Target) -> Finding:
    master = target.hosts[0] if target.hosts else os.environ.get("MASTER_ADDR", "")
    towards = [address for address in addresses(master) if not is_loopback(address)] if master else []
    try:
        address = address_towards(towards[0]) if towards else address_outward()
    except OSError as error:
        return problem(f"there is no route from here to {master} ({towards[0]}): {error}", f"ping -c 1 {towards[0]}")
    if address is None:
        return info("the loopback is the only network: ranks on this host only")
    name = interface_of(address)
    where = f" to {master}" if towards else " outward"
    return ok(f"{address}{f' of {name}' if name else ''} is the way{where}")
