"""A hand-written ring all-reduce: whole tensors travel once around, and every rank adds up what passes."""

from __future__ import annotations

import argparse

import torch

import unisono as un


def all_reduce(comm: un.Communicator, given: torch.Tensor, result: torch.Tensor) -> None:
    """`result` becomes the sum of all ranks' `given`. Sends p - 1 times the tensor."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    total = given.clone()
    outgoing, incoming = given.clone(), torch.empty_like(given)
    for _ in range(comm.size - 1):
        work = comm.isend(outgoing, right)
        comm.recv(incoming, left)
        total += incoming
        work.wait()
        # The tensor received from the left is sent on to the right; the other buffer is free again.
        outgoing, incoming = incoming, outgoing
    result.copy_(total)


def run(comm: un.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ring's result and the library's."""
    tensor = torch.arange(10.0) * (comm.rank + 1)
    mine, expected = torch.empty_like(tensor), tensor.clone()
    all_reduce(comm, tensor, mine)
    comm.all_reduce(expected)
    print(f"rank {comm.rank}: the ring {'agrees' if torch.equal(mine, expected) else 'DISAGREES'}")
    return mine, expected


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    given = parser.parse_args()
    un.launch(run, nprocs=given.ranks, backend=given.backend)
