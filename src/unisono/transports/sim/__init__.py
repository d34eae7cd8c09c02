"""Transport between simulated ranks, with a model of the network."""

from unisono.transports.sim.transport import TRANSPORT, Link, SimNetwork, SimTransport

__all__ = ["TRANSPORT", "Link", "SimNetwork", "SimTransport"]
