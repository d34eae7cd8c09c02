"""An all_gather that begins with this rank's tensor instead of that of rank 0."""

from __future__ import annotations

import torch

import unisono as un

COLLECTIVE = "all_gather"


def run(comm: un.Communicator, tensor: torch.Tensor, root: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(comm.size)]
    comm.all_gather(parts, tensor)
    return torch.cat(parts[comm.rank :] + parts[: comm.rank])
