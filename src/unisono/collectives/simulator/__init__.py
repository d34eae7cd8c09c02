"""Simulator of collectives on networks: alpha-beta-gamma and LogGP costs, shared links, stragglers and jitter."""

from __future__ import annotations

from unisono.collectives.simulator.event_queue import Message
from unisono.collectives.simulator.network import Level, Network
from unisono.collectives.simulator.simulation import Simulation, simulate

__all__ = ["Level", "Message", "Network", "Simulation", "simulate"]
