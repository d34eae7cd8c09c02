"""Does not check its arguments."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.compression import fp16

CHECK = "check_input"
ERROR = "without an error"


class CODEC(fp16):
    def prepare(
        self, flat: torch.Tensor, comm: Communicator, shapes: list[torch.Size], kept: torch.Tensor | None = None
    ) -> None:
        pass
