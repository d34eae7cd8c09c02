"""The last sample of each run is also the first of the next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from unisono.data.indices import Indices, Places
from unisono.data.partitions.contiguous import Contiguous

CHECK = "check_lossless"
ERROR = "more than one place"


class MUTANT(Contiguous):
    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        first, *others = super().divide(samples, shares, seed)
        return [first, *(range(before.stop - 1, run.stop) for before, run in pairwise([first, *others]))]
