"""Makes zeros of NaN and infinities."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.compression import int8

LAW = "check_nonfinite"
COMPLAINT = "nan of one rank has become 0"


class CODEC(int8):
    def average(
        self, flat: torch.Tensor, comm: Communicator, shapes: list[torch.Size], kept: torch.Tensor | None = None
    ) -> None:
        super().average(flat.nan_to_num_(0.0, 0.0, 0.0), comm, shapes, kept)
