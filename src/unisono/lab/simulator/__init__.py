"""Simulator for collectives on networks: alpha-beta-gamma and LogGP costs, shared links, stragglers and jitter."""

from unisono.lab.simulator.event_queue import Message
from unisono.lab.simulator.exports import chrome_trace, goal
from unisono.lab.simulator.network import Level, Network
from unisono.lab.simulator.simulation import Simulation, simulate
from unisono.lab.simulator.studies import Overlap, ScalingPoint, plot_scaling, scaling, simulate_backward

__all__ = [
    "Level",
    "Message",
    "Network",
    "Overlap",
    "ScalingPoint",
    "Simulation",
    "chrome_trace",
    "goal",
    "plot_scaling",
    "scaling",
    "simulate",
    "simulate_backward",
]
