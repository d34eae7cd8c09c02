"""Transports made of two others: one within each host, one between hosts."""

from __future__ import annotations

from unisono.compose.hierarchical import Hierarchical, Hosts, over
from unisono.compose.pair import Connectable, Pair, find_hosts, transport_named

__all__ = ["Connectable", "Hierarchical", "Hosts", "Pair", "find_hosts", "over", "transport_named"]
