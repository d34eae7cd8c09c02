"""Believes that its arguments are right."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.compression import fp16

LAW = "check_input"
COMPLAINT = "without an error"


class CODEC(fp16):
    def prepare(
        self, flat: torch.Tensor, comm: Communicator, shapes: list[torch.Size], kept: torch.Tensor | None = None
    ) -> None:
        pass
