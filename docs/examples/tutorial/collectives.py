"""The six collectives, one after the other: the tensors that each rank contributes, and its results."""

from __future__ import annotations

import argparse

import torch

import unisono as un


def run(comm: un.Communicator) -> dict[str, list[float]]:
    return {
        "broadcast": broadcast(comm),
        "reduce": reduce(comm),
        "all_reduce": all_reduce(comm),
        "scatter": scatter(comm),
        "gather": gather(comm),
        "all_gather": all_gather(comm),
    }


def mine(comm: un.Communicator) -> torch.Tensor:
    """Contribution of this rank: 1 on rank 0, 2 on rank 1, and so on."""
    return torch.tensor([comm.rank + 1.0])


def broadcast(comm: un.Communicator) -> list[float]:
    """One rank's tensor, on all."""
    tensor = mine(comm)
    comm.broadcast(tensor, src=0)
    return tensor.tolist()


def reduce(comm: un.Communicator) -> list[float]:
    """The sum of all tensors, on one rank; the others' stay as they are."""
    tensor = mine(comm)
    comm.reduce(tensor, dst=0, op="sum")
    return tensor.tolist()


def all_reduce(comm: un.Communicator) -> list[float]:
    """The product of all tensors, on every rank. Other operations: sum, avg, min, max."""
    tensor = mine(comm)
    comm.all_reduce(tensor, op="product")
    return tensor.tolist()


def scatter(comm: un.Communicator) -> list[float]:
    """The list of one rank, an entry for each."""
    tensor = torch.zeros(1)
    entries = [torch.tensor([10.0 * rank]) for rank in range(comm.size)] if comm.rank == 0 else None
    comm.scatter(tensor, entries, src=0)
    return tensor.tolist()


def gather(comm: un.Communicator) -> list[float]:
    """All tensors, in a list on one rank."""
    entries = [torch.zeros(1) for _ in range(comm.size)] if comm.rank == 0 else None
    comm.gather(mine(comm), entries, dst=0)
    return [entry.item() for entry in entries or []]


def all_gather(comm: un.Communicator) -> list[float]:
    """All tensors, in a list on every rank."""
    entries = [torch.zeros(1) for _ in range(comm.size)]
    comm.all_gather(entries, mine(comm))
    return [entry.item() for entry in entries]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    given = parser.parse_args()
    for rank, held in enumerate(un.launch(run, nprocs=given.ranks, backend=given.backend)):
        print(f"rank {rank}: {held}")
