"""Shuffles, and trusts that labels come out even."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.data.feistel import IndexShuffle
from unisono.data.partitions.stratified import Stratified

LAW = "check_balance"
COMPLAINT = "has label"


class MUTANT(Stratified):
    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        return IndexShuffle(len(samples), seed).all() % len(shares)
