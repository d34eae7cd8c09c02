"""Lines between hosts: plain sockets from one rank of each host to one of each other, for short packets.

What hosts have to agree on, and what is short, goes here. Whoever waits for a packet reads it, with no thread
between; a packet says how long it is; and a wait ends at once when the group fails. Libraries that move bulk data
offer none of the three.
"""

from __future__ import annotations

from unisono.transports.hierarchical.host_links.connect import check_reachability, meet
from unisono.transports.hierarchical.host_links.exchange import HostLinks, Packet

__all__ = ["HostLinks", "Packet", "check_reachability", "meet"]
