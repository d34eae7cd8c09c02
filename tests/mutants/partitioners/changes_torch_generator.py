"""Correct, but changes later random numbers of the program."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.data.indices import Indices, Places
from unisono.data.partitions.strided import Strided

CHECK = "check_same_everywhere"
ERROR = "torch's global random generator was changed"


class MUTANT(Strided):
    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        torch.manual_seed(seed)
        return super().divide(samples, shares, seed)
