"""A dataset in parts: random, the same on all ranks, and together they lose no sample."""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import unisono as un


def run(comm: un.Communicator, count: int = 100) -> dict[str, list[int]]:
    """The samples that this rank sees: of three uneven parts (those past the third see none), and of equal ones."""
    dataset = TensorDataset(torch.arange(count))
    return {
        "uneven": seen(dataset, [0.7, 0.2, 0.1], comm.rank) if comm.rank < 3 else [],
        "thirds": seen(dataset, [1 / 3, 1 / 3, 1 / 3], comm.rank) if comm.rank < 3 else [],
        "equal": seen(dataset, [1 / comm.size] * comm.size, comm.rank),
    }


def seen(dataset: TensorDataset, sizes: list[float], rank: int) -> list[int]:
    part = un.data.DataPartitioner(dataset, sizes, seed=1234).use(rank)
    loader = DataLoader(part, batch_size=16)
    return [sample for (batch,) in loader for sample in batch.tolist()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    given = parser.parse_args()
    for rank, parts in enumerate(un.launch(run, nprocs=given.ranks, backend=given.backend)):
        print(f"rank {rank} sees {', '.join(f'{len(part)} samples ({name})' for name, part in parts.items())}")
