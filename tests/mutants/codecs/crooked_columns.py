"""Takes P as it is, not made orthonormal."""

from __future__ import annotations

import torch

from unisono.compression import powersgd

LAW = "check_average"
COMPLAINT = "was lost, more than the declared"


class CODEC(powersgd):
    @staticmethod
    def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
        return columns
