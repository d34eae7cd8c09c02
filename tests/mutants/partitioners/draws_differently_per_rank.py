"""Every rank draws other random numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from unisono.data.feistel import IndexShuffle
from unisono.data.indices import Indices
from unisono.data.partitions.shuffled import Shuffled

CHECK = "check_same_everywhere"
ERROR = "differs between ranks"


class MUTANT(Shuffled):
    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        return IndexShuffle(count, random.SystemRandom().randrange(2**60), epoch)
