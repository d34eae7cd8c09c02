"""Lists the positions of each part backwards, so that the rest of a part is its beginning."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.data.indices import Indices, Places, taken_from
from unisono.data.partitions.strided import Strided

CHECK = "check_lossless"
ERROR = "do not ascend"


class MUTANT(Strided):
    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        return [taken_from(part, 0, len(part)).flip(0) for part in super().divide(samples, shares, seed)]
