"""A broadcast that sends a move instead of a tuple of moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unisono.collectives.algorithms.broadcast.binomial import chunks, cost
from unisono.collectives.algorithms.step import Move, Step

__all__ = ["COLLECTIVE", "ERROR", "chunks", "cost", "steps"]

COLLECTIVE = "broadcast"
ERROR = r"step 1: send=Move\(.*\) is not a tuple of moves; write send=\(Move\(\.\.\.\),\), with the comma"


def steps(rank: int, size: int) -> Iterator[Step]:
    move: Any = Move((rank + 1) % size, 0, 1)
    yield Step(send=move)
