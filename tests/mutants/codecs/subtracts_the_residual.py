"""Subtracts the residual that it should add."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.compression import error_feedback

CHECK = "check_feedback"
ERROR = "the error grows|is missing"


class CODEC(error_feedback):
    def average(
        self, flat: torch.Tensor, comm: Communicator, shapes: list[torch.Size], kept: torch.Tensor | None = None
    ) -> None:
        super().average(flat, comm, shapes, kept)
        self._residual.neg_()
