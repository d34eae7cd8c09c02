"""The program of ddp_before.py on unisono.

unisono run -n 2 docs/examples/coming_from/ddp_after.py
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as un


def train(comm: un.Communicator, shuffle: bool = True) -> float:
    """Train a small model, and return the sum of its weights."""
    inputs = torch.randn(256, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(inputs, inputs[:, :3].sin())
    sampler = un.data.PartitionSampler(samples, comm, shuffle=shuffle, drop_last=True)
    loader = DataLoader(samples, batch_size=8, sampler=sampler)
    torch.manual_seed(comm.rank)  # the averager takes rank 0's parameters
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    averager = un.GradientAverager(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            last = step % 2 == 1  # each second batch ends a step
            with nullcontext() if last else averager.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / 2
                loss.backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        comm.all_reduce(loss.detach(), "avg")  # in place; detached, because no gradient passes through a collective
        if comm.rank == 0:
            print(f"epoch {epoch}: loss {2 * loss.item():.12f}")
    total = sum(p.detach().sum().item() for p in model.parameters())
    if comm.rank == 0:
        print(f"weights sum to {total:.12f}")
    averager.remove()
    return total


if __name__ == "__main__":
    with un.init() as comm:
        train(comm)
