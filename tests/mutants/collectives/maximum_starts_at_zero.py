"""A maximum whose first value is 0 instead of the first tensor."""

from __future__ import annotations

import torch

import unisono as un

COLLECTIVE = "maximum"


def run(comm: un.Communicator, tensor: torch.Tensor, root: int) -> torch.Tensor:
    found = torch.zeros_like(tensor)
    for other in comm.all_gather_object(tensor.tolist()):
        found = found.maximum(torch.tensor(other, dtype=tensor.dtype))
    return found
