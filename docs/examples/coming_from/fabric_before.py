"""Lightning Fabric: one of the programs that accelerate_after.py converts.

torchrun --nproc-per-node 2 docs/examples/coming_from/fabric_before.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(fabric: Fabric, shuffle: bool = True) -> float:
    """Train a small model, and return the sum of its weights."""
    inputs = torch.randn(250, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(inputs, inputs[:, :3].sin())
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=8, shuffle=shuffle, drop_last=True))
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: last loss {fabric.all_reduce(loss.detach()).item():.12f}")
    total = sum(p.detach().sum().item() for p in model.parameters())
    fabric.print(f"weights sum to {total:.12f}")
    return total


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    train(fabric, shuffle="--in-order" not in sys.argv)
    # Else gloo's threads may free tensors when Python has ended, which aborts the process.
    dist.destroy_process_group()
