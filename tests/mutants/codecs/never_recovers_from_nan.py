"""Keeps a NaN as the residual of the next step."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.compression import error_feedback

CHECK = "check_nonfinite"
ERROR = "spoils the next"


class CODEC(error_feedback):
    def average(
        self, flat: torch.Tensor, comm: Communicator, shapes: list[torch.Size], kept: torch.Tensor | None = None
    ) -> None:
        super().average(flat, comm, shapes, kept)
        self._residual += 0 * flat
