"""Transport between simulated ranks, with a model of the network."""

from __future__ import annotations

from unisono.transports.sim.transport import TRANSPORT, Link, Network, SimTransport

__all__ = ["TRANSPORT", "Link", "Network", "SimTransport"]
