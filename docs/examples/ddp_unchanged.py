"""An ordinary DDP program for torchrun. One name, which is marked, makes it run on unisono.

    torchrun --nproc-per-node 2 docs/examples/ddp_unchanged.py
    torchrun --nproc-per-node 2 docs/examples/ddp_unchanged.py gloo

Both end with the same weights.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(backend: str = "unisono", epochs: int = 5) -> float:  # <- this name
    """Train a classifier of points, and return the sum of all weights."""
    dist.init_process_group(backend)
    # `learn` frees the model before the group is destroyed. Otherwise gloo hangs now and then: DDP, freed last,
    # holds the GIL while it waits for gloo's thread, which needs it.
    weights = learn(epochs)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: weights sum to {weights:.12f}")
    dist.destroy_process_group()
    return weights


def learn(epochs: int) -> float:
    points = torch.randn(1024, 2, generator=torch.Generator().manual_seed(1234))
    samples = TensorDataset(points, (points[:, 0] * points[:, 1] > 0).long())
    sampler = DistributedSampler(samples, seed=1)
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, sides in DataLoader(samples, batch_size=64, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), sides)
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    return sum(p.detach().double().sum().item() for p in model.parameters())


if __name__ == "__main__":
    main(*sys.argv[1:2])
