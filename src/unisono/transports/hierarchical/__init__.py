"""Transports made of two others: one within each host, one between hosts."""

from __future__ import annotations

from unisono.transports.hierarchical.by_name import Connectable, Pair, find_hosts, transport_named
from unisono.transports.hierarchical.transport import Hierarchical, Hosts, over

__all__ = ["Connectable", "Hierarchical", "Hosts", "Pair", "find_hosts", "over", "transport_named"]
