"""Deals what is left by what was dealt first, so that one part may get it all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from unisono.data.assignment import AssignmentPartitioner

LAW = "check_resume"
COMPLAINT = "part 0 has samples"


class MUTANT(AssignmentPartitioner):
    @classmethod
    def of(cls, dataset: Any) -> Self:
        return cls(torch.arange(len(dataset)), "samples")

    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        return samples * len(shares) // len(self._known)
