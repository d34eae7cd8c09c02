"""The Horovod program of docs/coming-from/horovod.md on unisono.

unisono run -n 2 docs/examples/coming_from/horovod_after.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as un


def train(comm: un.Communicator, shuffle: bool = True) -> tuple[float, float]:
    """Train a small classifier; its accuracy on all samples, and the sum of its weights."""
    points = torch.randn(512, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1234))
    samples = TensorDataset(points, (points[:, 0] * points[:, 1] > 0).long())
    sampler = un.data.PartitionSampler(samples, comm, shuffle=shuffle, drop_last=True)
    loader = DataLoader(samples, batch_size=32, sampler=sampler)
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * comm.size, momentum=0.5)
    averager = un.GradientAverager(model, comm)  # broadcasts rank 0's parameters; compression="fp16" sends half
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)  # the gradients are averaged already
            optimizer.step()
    averager.remove()
    part = un.data.PartitionSampler(samples, comm, shuffle=False)
    right = torch.cat([model(x).argmax(1) == y for x, y in DataLoader(samples, batch_size=32, sampler=part)])
    accuracy = un.data.gather_metrics(comm, {"accuracy": right})["accuracy"]
    total = sum(p.detach().sum().item() for p in model.parameters())
    if comm.rank == 0:
        print(f"accuracy {accuracy:.4f}, weights sum to {total:.12f}")
    return accuracy, total


if __name__ == "__main__":
    with un.init() as comm:
        train(comm)
