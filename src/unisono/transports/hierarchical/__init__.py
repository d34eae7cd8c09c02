"""Transports that combine two transports: one inside each host, and one between hosts."""

from unisono.transports.hierarchical.transport import Connectable, TransportPair, find_hosts, transport_named

__all__ = ["Connectable", "TransportPair", "find_hosts", "transport_named"]
