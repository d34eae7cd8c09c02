"""The program of accelerate_before.py and fabric_before.py on unisono.

unisono run -n 2 docs/examples/coming_from/accelerate_after.py
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as un


def train(comm: un.Communicator, shuffle: bool = True, batch: int | None = None) -> float:
    """Train a small model by steps of `batch` samples (default: 8 a rank), and return the sum of its weights."""
    inputs = torch.randn(250, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(inputs, inputs[:, :3].sin())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    averager = un.GradientAverager(model, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = un.data.GlobalBatchSampler(
        samples, comm, batch_size=batch or 8 * comm.size, shuffle=shuffle, drop_last=True
    )
    loader = DataLoader(samples, batch_sampler=batches)
    test = DataLoader(samples, batch_size=8, sampler=un.data.PartitionSampler(samples, comm, shuffle=False))
    for epoch in range(3):
        batches.set_epoch(epoch)
        for x, y in loader:
            averager.weight(len(x))  # ranks may have one sample more than others
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            errors = torch.cat([(model(x) - y).square().mean(1) for x, y in test])
        error = un.data.gather_metrics(comm, {"error": errors})["error"]
        if comm.rank == 0:
            print(f"epoch {epoch}: error {error:.12f}")
    total = sum(p.detach().sum().item() for p in model.parameters())
    if comm.rank == 0:
        print(f"weights sum to {total:.12f}")
    averager.remove()
    return total


if __name__ == "__main__":
    with un.init() as comm:
        train(comm, shuffle="--in-order" not in sys.argv)
