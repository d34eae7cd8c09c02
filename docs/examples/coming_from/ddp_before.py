"""Torch's DistributedDataParallel: the program that ddp_after.py converts.

torchrun --nproc-per-node 2 docs/examples/coming_from/ddp_before.py
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(shuffle: bool = True) -> float:
    """Train a small model, and return the sum of its weights."""
    inputs = torch.randn(256, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(inputs, inputs[:, :3].sin())
    sampler = DistributedSampler(samples, shuffle=shuffle)
    loader = DataLoader(samples, batch_size=8, sampler=sampler)
    torch.manual_seed(dist.get_rank())  # DDP takes rank 0's parameters
    plain = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            last = step % 2 == 1  # each second batch ends a step
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / 2
                loss.backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {2 * loss.item() / dist.get_world_size():.12f}")
    total = sum(p.detach().sum().item() for p in model.module.parameters())
    if dist.get_rank() == 0:
        print(f"weights sum to {total:.12f}")
    return total


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
