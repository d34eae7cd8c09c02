"""Transport between simulated ranks, with a model of the network."""

from __future__ import annotations

from unisono.transports.sim.transport import TRANSPORT, Link, SimNetwork, SimTransport

__all__ = ["TRANSPORT", "Link", "SimNetwork", "SimTransport"]
