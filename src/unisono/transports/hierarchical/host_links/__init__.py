"""Links between hosts: plain sockets from one rank of each host to one rank of each other host, for short packets.

They carry agreements between hosts and short data. The waiting thread itself reads a packet, without a helper thread;
a packet carries its length; and a wait ends immediately when the group fails. Libraries that move bulk data offer
none of the three.
"""

from __future__ import annotations

from unisono.transports.hierarchical.host_links.connect import check_reachability, meet
from unisono.transports.hierarchical.host_links.exchange import HostLinks, Packet

__all__ = ["HostLinks", "Packet", "check_reachability", "meet"]
