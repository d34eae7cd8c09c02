"""Hugging Face's Accelerate: one of the programs that accelerate_after.py converts.

torchrun --nproc-per-node 2 docs/examples/coming_from/accelerate_before.py
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(accelerator: Accelerator, shuffle: bool = True) -> float:
    """Train a small model, and return the sum of its weights."""
    inputs = torch.randn(250, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(inputs, inputs[:, :3].sin())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(samples, batch_size=8, shuffle=shuffle, drop_last=True)
    test = DataLoader(samples, batch_size=8)
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            errors = [accelerator.gather_for_metrics((model(x) - y).square().mean(1)) for x, y in test]
        accelerator.print(f"epoch {epoch}: error {torch.cat(errors).mean().item():.12f}")
    total = sum(p.detach().sum().item() for p in accelerator.unwrap_model(model).parameters())
    accelerator.print(f"weights sum to {total:.12f}")
    return total


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    train(accelerator, shuffle="--in-order" not in sys.argv)
    accelerator.end_training()
