"""Synchronous distributed SGD: each rank trains on its part of the data, and gradients are averaged.

`dataset()` draws points and labels them by a curve; replace it by your own.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import unisono as un

BATCH = 128


def dataset() -> TensorDataset:
    points = torch.randn(1024, 2, generator=torch.Generator().manual_seed(1234))
    return TensorDataset(points, (points[:, 0] * points[:, 1] > 0).long())


def partition_dataset(comm: un.Communicator) -> DataLoader[tuple[torch.Tensor, ...]]:
    """This rank's part, in batches that are as large together as one rank's would be."""
    samples = dataset()
    part = un.data.DataPartitioner(samples, [1 / comm.size] * comm.size).use(comm.rank)
    # Every rank must take as many steps as the others, so parts that are one sample longer give it up.
    return DataLoader(part[: len(samples) // comm.size], batch_size=BATCH // comm.size)


def run(comm: un.Communicator, epochs: int = 20) -> tuple[float, list[torch.Tensor]]:
    """The mean loss of the last epoch on this rank, and the weights."""
    batches = partition_dataset(comm)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    un.broadcast_parameters(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    mean = float("nan")
    for epoch in range(epochs):
        total = 0.0
        for points, sides in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(points), sides)
            total += loss.item()
            loss.backward()
            un.average_gradients(model, comm)
            optimizer.step()
        mean = total / len(batches)
        if epoch % 5 == 4:
            print(f"rank {comm.rank}, epoch {epoch + 1}: loss {mean:.3f}")
    return mean, [parameter.detach() for parameter in model.parameters()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    given = parser.parse_args()
    un.launch(run, nprocs=given.ranks, backend=given.backend)
