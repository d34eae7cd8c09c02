"""Transports that combine two transports: one inside each host, and one between hosts."""

from unisono.transports.hierarchical.transport import (
    Connectable,
    Hierarchical,
    Hosts,
    TransportPair,
    find_hosts,
    over,
    transport_named,
)

__all__ = ["Connectable", "Hierarchical", "Hosts", "TransportPair", "find_hosts", "over", "transport_named"]
