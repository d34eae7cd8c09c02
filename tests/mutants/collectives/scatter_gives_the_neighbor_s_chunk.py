"""A reduce_scatter that returns the chunk of the next rank."""

from __future__ import annotations

import torch

import unisono as un

COLLECTIVE = "reduce_scatter"


def run(comm: un.Communicator, tensor: torch.Tensor, root: int) -> torch.Tensor:
    comm.all_reduce(tensor)
    return tensor.tensor_split(comm.size)[(comm.rank + 1) % comm.size]
