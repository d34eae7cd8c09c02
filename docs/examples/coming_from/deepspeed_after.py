"""The DeepSpeed program of docs/coming-from/deepspeed.md on unisono.

unisono run -n 2 docs/examples/coming_from/deepspeed_after.py runs/1
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as un


def train(comm: un.Communicator, folder: str, stop: int = 16, shuffle: bool = True) -> tuple[int, float]:
    """Train till step `stop`, from the newest checkpoint in the folder on; the step, and the sum of the weights."""
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(inputs, inputs[:, :3].sin())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    averager = un.GradientAverager(model, comm, average="sum")  # of losses that are parts of the step's mean
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    # 32 samples a step: 2 micro-batches of 16, which the ranks share
    batches = un.data.GlobalBatchSampler(samples, comm, batch_size=16, shuffle=shuffle, drop_last=True)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": batches, "step": 0}
    with un.checkpoint.Checkpointer(folder, comm, every=4) as checkpointer:
        checkpointer.load(state)
        while state["step"] < stop:
            batches.set_epoch(state["step"] // 8)
            for micro, (x, y) in enumerate(DataLoader(samples, batch_sampler=batches)):
                last = micro % 2 == 1
                with nullcontext() if last else averager.no_sync():
                    (nn.functional.mse_loss(model(x), y, reduction="sum") / (32 * 3)).backward()
                if last:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    batches.advance(2)
                    state["step"] += 1
                    checkpointer.step(state["step"], state)
                if state["step"] == stop:
                    break
    averager.remove()
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    if comm.rank == 0:
        print(f"step {state['step']}, weights sum to {total:.9f}")
    return state["step"], total


if __name__ == "__main__":
    with un.init() as comm:
        folder, *stop = sys.argv[1:]
        train(comm, folder, *map(int, stop))
