"""Divides by samples instead of by groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.data.partitions.grouped import Grouped

CHECK = "check_balance"
ERROR = "group .* is in parts"


class MUTANT(Grouped):
    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        return torch.arange(len(samples)) % len(shares)
