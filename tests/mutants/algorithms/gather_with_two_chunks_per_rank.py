"""A gather with two chunks for one rank's contribution."""

from __future__ import annotations

from unisono.collectives.algorithms.gather.binomial import cost, steps

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "gather"
ERROR = r"among 2 ranks there are 4 chunks; this collective needs 2"


def chunks(size: int) -> int:
    return 2 * size
