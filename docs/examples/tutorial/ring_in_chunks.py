"""The ring all-reduce in chunks: each rank passes on one chunk at a time, so that every link is always busy.

First the chunks are added up on their way around the ring, until each rank holds the sum of one of
them; then the sums go around. A rank sends 2 (p - 1) / p times the tensor, whatever p is.
"""

from __future__ import annotations

import argparse

import torch

import unisono as un


def all_reduce(comm: un.Communicator, tensor: torch.Tensor) -> None:
    """The tensor becomes the sum of all ranks' tensors, in place. It must be contiguous."""
    chunks = tensor.view(-1).tensor_split(comm.size)
    for step in range(comm.size - 1):
        add_next(comm, chunks[(comm.rank - step) % comm.size], chunks[(comm.rank - step - 1) % comm.size])
    for step in range(comm.size - 1):
        pass_on(comm, chunks[(comm.rank - step + 1) % comm.size], chunks[(comm.rank - step) % comm.size])


def add_next(comm: un.Communicator, outgoing: torch.Tensor, total: torch.Tensor) -> None:
    incoming = torch.empty_like(total)
    pass_on(comm, outgoing, incoming)
    total += incoming


def pass_on(comm: un.Communicator, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send to the right while receiving from the left."""
    sending = comm.isend(outgoing, dst=(comm.rank + 1) % comm.size)
    receiving = comm.irecv(incoming, src=(comm.rank - 1) % comm.size)
    receiving.wait()
    sending.wait()


def run(comm: un.Communicator, length: int = 1003) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ring's result and the library's."""
    tensor = torch.arange(float(length)) * (comm.rank + 1)
    expected = tensor.clone()
    if comm.size > 1:
        all_reduce(comm, tensor)
    comm.all_reduce(expected)
    print(f"rank {comm.rank}: the ring {'agrees' if torch.equal(tensor, expected) else 'DISAGREES'}")
    return tensor, expected


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    given = parser.parse_args()
    un.launch(run, nprocs=given.ranks, backend=given.backend)
