"""Divides the remaining samples by their first assignment, so that one part may get all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from unisono.data.partitioner import AssignmentPartitioner

CHECK = "check_resume"
ERROR = "part 0 has samples"


class MUTANT(AssignmentPartitioner):
    @classmethod
    def of(cls, dataset: Any) -> Self:
        return cls(torch.arange(len(dataset)), "samples")

    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        return samples * len(shares) // len(self._known)
