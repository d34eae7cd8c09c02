"""A reduce_scatter whose last rank does not get the rest of an uneven division."""

from __future__ import annotations

import torch

import unisono as un

COLLECTIVE = "reduce_scatter"


def run(comm: un.Communicator, tensor: torch.Tensor, root: int) -> torch.Tensor:
    comm.all_reduce(tensor)
    length = len(tensor) // comm.size
    return tensor[comm.rank * length : (comm.rank + 1) * length]
