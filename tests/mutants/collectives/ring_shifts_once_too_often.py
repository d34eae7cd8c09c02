"""An all_reduce around a ring, with one step too many."""

from __future__ import annotations

import torch

import unisono as un

COLLECTIVE = "all_reduce"


def run(comm: un.Communicator, tensor: torch.Tensor, root: int) -> torch.Tensor:
    total, passed = tensor.clone(), tensor.clone()
    for _ in range(comm.size):
        received = torch.empty_like(passed)
        work = comm.isend(passed, (comm.rank + 1) % comm.size) if comm.size > 1 else None
        if work is None:
            break
        comm.recv(received, (comm.rank - 1) % comm.size)
        work.wait()
        passed = received
        total += passed
    return total
