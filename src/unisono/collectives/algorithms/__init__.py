"""Collective algorithms by name, each a file of pure integers: `algorithms/<collective>/<algorithm>.py`."""

from __future__ import annotations

from unisono.collectives.algorithms.semantics import COLLECTIVES, chunks_of
from unisono.collectives.algorithms.step import Algorithm, Cost, Move, Step
from unisono.core.registry import Registry

__all__ = ["ALGORITHMS", "COLLECTIVES", "Algorithm", "Cost", "Move", "Step", "chunks_of"]

ALGORITHMS: dict[str, Registry[Algorithm]] = {
    collective: Registry(
        f"{collective} algorithm",
        f"unisono.collectives.algorithms.{collective}",
        group=f"unisono.algorithms.{collective}",
    )
    for collective in COLLECTIVES
}
"""For each collective, its algorithms: `ALGORITHMS["all_reduce"]["ring"]`."""
