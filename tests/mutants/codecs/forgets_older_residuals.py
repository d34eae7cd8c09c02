"""Drops the residual from before the last step."""

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
        mine = flat.clone()
        kept = torch.empty_like(flat) if kept is None else kept
        super().average(flat, comm, shapes, kept)
        self._residual = mine - kept
