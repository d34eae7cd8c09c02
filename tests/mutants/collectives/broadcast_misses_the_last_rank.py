"""A broadcast that does not reach the last rank."""

from __future__ import annotations

import torch

import unisono as un

COLLECTIVE = "broadcast"


def run(comm: un.Communicator, tensor: torch.Tensor, root: int) -> torch.Tensor:
    if comm.rank == root:
        for rank in range(comm.size - 1):
            if rank != root:
                comm.send(tensor, rank)
    elif comm.rank < comm.size - 1:
        comm.recv(tensor, root)
    return tensor
