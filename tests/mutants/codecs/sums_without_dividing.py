"""Does not divide by the number of ranks."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.compression import fp16

CHECK = "check_average"
ERROR = "away from the mean of what was kept"


class CODEC(fp16):
    def average(
        self, flat: torch.Tensor, comm: Communicator, shapes: list[torch.Size], kept: torch.Tensor | None = None
    ) -> None:
        super().average(flat, comm, shapes, kept)
        flat.mul_(comm.size)
