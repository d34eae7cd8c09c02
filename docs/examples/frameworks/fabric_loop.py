"""Fabric: a plain loop that Lightning spreads over the ranks.

torchrun --nproc-per-node 4 docs/examples/frameworks/fabric_loop.py --backend unisono
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono.interop  # noqa: F401    registers the backend


def main(backend: str) -> None:
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    strategy = DDPStrategy(process_group_backend=backend)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, precision="64-true")
    fabric.launch()
    train(fabric)
    dist.destroy_process_group()


def train(fabric: Fabric) -> None:
    torch.manual_seed(fabric.global_rank)  # DDP takes rank 0's parameters
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, inputs[:, :3].sin()), 8, shuffle=True))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    fabric.print(f"{fabric.world_size} ranks on {dist.get_backend()}")
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for step, (some, goals) in enumerate(loader):
            odd = step % 2 == 1
            with fabric.no_backward_sync(model, enabled=not odd):
                loss = nn.functional.mse_loss(model(some), goals)
                fabric.backward(loss)
            if odd:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        losses = fabric.all_gather(loss)
        fabric.print(f"epoch {epoch}: loss {fabric.all_reduce(loss)}, greatest {losses.max()}, gradient {norm}")
    total = sum(parameter.detach().sum() for parameter in model.parameters())
    fabric.print(f"weights sum to {total}, on all ranks to {fabric.all_reduce(total, reduce_op='sum')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="unisono")
    main(parser.parse_args().backend)
