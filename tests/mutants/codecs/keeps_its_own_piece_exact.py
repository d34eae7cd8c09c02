"""The owner of a piece keeps its exact sum instead of the encoded one."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.compression import int8

CHECK = "check_average"
ERROR = "not bit-identical"


class CODEC(int8):
    def average(
        self, flat: torch.Tensor, comm: Communicator, shapes: list[torch.Size], kept: torch.Tensor | None = None
    ) -> None:
        exact = flat.clone()
        comm.all_reduce(exact, "avg")
        super().average(flat, comm, shapes, kept)
        own = slice(comm.rank * (flat.numel() // comm.size), (comm.rank + 1) * (flat.numel() // comm.size))
        flat[own] = exact[own]
