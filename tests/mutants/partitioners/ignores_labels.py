"""Shuffles without balancing labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.data.feistel import IndexShuffle
from unisono.data.partitions.stratified import Stratified

CHECK = "check_balance"
ERROR = "has label"


class MUTANT(Stratified):
    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        return IndexShuffle(len(samples), seed).all() % len(shares)
