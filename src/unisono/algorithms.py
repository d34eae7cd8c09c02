"""Collective algorithms: find, verify, simulate and write them.

Each algorithm is a file in `unisono.collectives.algorithms` that computes only with integers.

Example:
    >>> un.algorithms.verify("all_reduce", "ring", size=8).cost
    Cost(rounds=14, messages=14, sent=14)
"""

from unisono.collectives.algorithms import (
    ALGORITHMS,
    COLLECTIVES,
    Algorithm,
    AlgorithmFile,
    Cost,
    Move,
    Step,
    elements,
    find,
    mirrored,
    move_of,
    others,
    serving,
    wrapped,
)
from unisono.collectives.verify.prover import AlgorithmError, Proof, verify
from unisono.lab.player.from_algorithm import play
from unisono.lab.simulator import (
    Level,
    Message,
    Network,
    Overlap,
    ScalingPoint,
    Simulation,
    chrome_trace,
    goal,
    plot_scaling,
    scaling,
    simulate,
    simulate_backward,
)

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "Algorithm",
    "AlgorithmError",
    "AlgorithmFile",
    "Cost",
    "Level",
    "Message",
    "Move",
    "Network",
    "Overlap",
    "Proof",
    "ScalingPoint",
    "Simulation",
    "Step",
    "chrome_trace",
    "elements",
    "find",
    "goal",
    "mirrored",
    "move_of",
    "others",
    "play",
    "plot_scaling",
    "scaling",
    "serving",
    "simulate",
    "simulate_backward",
    "verify",
    "wrapped",
]
