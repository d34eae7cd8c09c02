"""Truncates to a length that all parts can share."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.data.indices import Indices, Places
from unisono.data.partitions.strided import Strided

CHECK = "check_lossless"
ERROR = "in no part: 1 of 100"


class MUTANT(Strided):
    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        parts = len(shares)
        return [range(part, len(samples) // parts * parts, parts) for part in range(parts)]
