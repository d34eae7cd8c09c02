"""Accelerate: a plain loop whose model, optimizer and data it spreads over the ranks.

torchrun --nproc-per-node 4 docs/examples/frameworks/accelerate_loop.py --backend unisono
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono.interop  # noqa: F401    registers the backend


def main(backend: str) -> None:
    dist.init_process_group(backend)  # before Accelerate, which takes a group that is there
    torch.set_default_dtype(torch.float64)
    train(Accelerator(cpu=True, gradient_accumulation_steps=2))
    dist.destroy_process_group()


def train(accelerator: Accelerator) -> None:
    torch.manual_seed(accelerator.process_index)  # DDP takes rank 0's parameters
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    inputs = torch.randn(250, 8, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(inputs, inputs[:, :3].sin())
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), DataLoader(samples, batch_size=8, shuffle=True)
    )
    accelerator.print(f"{accelerator.num_processes} ranks on {dist.get_backend()}")
    for epoch in range(3):
        for some, goals in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(some), goals)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            # Leave out the samples that Accelerate repeated, because 250 do not divide by the ranks.
            errors = [accelerator.gather_for_metrics((model(some) - goals).square()) for some, goals in loader]
        accelerator.print(f"epoch {epoch}: error {torch.cat(errors).sum()} of {sum(map(len, errors))} samples")
    total = sum(parameter.detach().sum() for parameter in accelerator.unwrap_model(model).parameters())
    accelerator.print(f"weights sum to {total}, on all ranks to {accelerator.reduce(total)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="unisono")
    main(parser.parse_args().backend)
