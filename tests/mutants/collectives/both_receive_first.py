"""An exchange between pairs of ranks that both receive before they send."""

from __future__ import annotations

import torch

import unisono as un

COLLECTIVE = "all_reduce"


def run(comm: un.Communicator, tensor: torch.Tensor, root: int) -> torch.Tensor:
    total = tensor.clone()
    for rank in range(comm.size):
        if rank != comm.rank:
            received = torch.empty_like(tensor)
            comm.recv(received, rank)
            comm.send(tensor, rank)
            total += received
    return total
