"""Checks only its own arguments, not those of other ranks."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.compression import topk
from unisono.compression.codec import check_bucket

CHECK = "check_mismatch"
ERROR = "no rank noticed"


class CODEC(topk):
    def prepare(
        self, flat: torch.Tensor, comm: Communicator, shapes: list[torch.Size], kept: torch.Tensor | None = None
    ) -> None:
        check_bucket(flat, shapes, kept)
