"""Swing in which odd ranks go the same way round as even ones."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce.swing_latency import chunks, cost, unsupported
from unisono.collectives.algorithms.butterfly import exchanges
from unisono.collectives.algorithms.step import Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps", "unsupported"]

COLLECTIVE = "all_reduce"
ERROR = r"rank 0 of 4.*step 1: deadlock of waiting ranks: .* chunk 0 from rank \d, which is in its step 1"


def _forward(rank: int, step: int, size: int) -> int:
    return (rank + (1 - (-2) ** (step + 1)) // 3) % size


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from exchanges(rank, size, _forward)
