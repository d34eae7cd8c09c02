"""ZeroRedundancyOptimizer: each rank holds the optimizer's state of its part of the parameters.

torchrun --nproc-per-node 4 docs/examples/frameworks/zero_redundancy.py --backend unisono
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import unisono.interop  # noqa: F401    registers the backend


def main(backend: str) -> None:
    dist.init_process_group(backend)
    torch.set_default_dtype(torch.float64)
    train()
    dist.destroy_process_group()


def train() -> None:
    torch.manual_seed(dist.get_rank())  # DDP takes rank 0's parameters
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 3)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {dist.get_backend()}")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(5):
        inputs = torch.randn(16, 8, generator=generator)
        loss = (model(inputs) - inputs[:, :3].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss / dist.get_world_size()}")
    # Rank 0 collects the state of all parts, as for a checkpoint.
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        states = optimizer.state_dict()["state"].values()
        print(f"squares of gradients sum to {sum(state['exp_avg_sq'].sum().item() for state in states)}")
        print(f"weights sum to {sum(parameter.sum().item() for parameter in model.parameters())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="unisono")
    main(parser.parse_args().backend)
