"""Keeps a NaN as what is left over for the next step."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.compression import error_feedback

LAW = "check_nonfinite"
COMPLAINT = "spoils the next"


class CODEC(error_feedback):
    def average(
        self, flat: torch.Tensor, comm: Communicator, shapes: list[torch.Size], kept: torch.Tensor | None = None
    ) -> None:
        super().average(flat, comm, shapes, kept)
        self._residual += 0 * flat
