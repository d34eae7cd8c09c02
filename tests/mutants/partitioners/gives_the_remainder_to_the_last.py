"""Rounds every part down except the last."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.data.indices import Indices, Places
from unisono.data.partitions.contiguous import Contiguous

CHECK = "check_balance"
ERROR = "has samples 3"


class MUTANT(Contiguous):
    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        count, parts = len(samples), len(shares)
        # Fewer than their share for all but one.
        each = count // parts - 1
        return [range(part * each, count if part + 1 == parts else (part + 1) * each) for part in range(parts)]
