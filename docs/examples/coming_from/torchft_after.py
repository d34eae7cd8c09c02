"""The torchft program of docs/coming-from/torchft.md on unisono: a rank dies, and the others finish the training.

python docs/examples/coming_from/torchft_after.py
"""

from __future__ import annotations

import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as un


def train(
    comm: un.Communicator, epochs: int = 2, kill: tuple[int, int] | None = None, shuffle: bool = True
) -> tuple[int, int, float]:
    """Train a small model. At the end: ranks, steps, sum of the weights. `kill` is a rank, and the step it dies at."""
    me = comm.rank
    inputs = torch.randn(256, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(inputs, inputs[:, :3].sin())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    averager = un.GradientAverager(model, comm)
    sampler = un.data.GlobalBatchSampler(samples, comm, batch_size=32, shuffle=shuffle)
    training = un.elastic.Recovery(comm, model=model, optimizer=optimizer, averager=averager, sampler=sampler)
    epoch = 0
    while epoch < epochs:
        sampler.set_epoch(epoch)
        try:
            for x, y in DataLoader(samples, batch_sampler=sampler):
                if kill == (me, training.step):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                averager.weight(len(x))
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                training.commit()  # the step counts
            epoch += 1
        except un.CommError as error:
            lost = str(error).splitlines()[0]
            training.recover()  # the survivors, at the same step
            epoch = sampler.epoch
            if training.comm.rank == 0:
                print(f"{lost}\n{training.comm.size} ranks go on at step {training.step}")
    return training.comm.size, training.step, sum(p.detach().sum().item() for p in model.parameters())


if __name__ == "__main__":
    results = un.launch(train, 3, "shm", kwargs={"kill": (1, 5)}, on_failure="continue")
    for rank, result in enumerate(results):
        print(f"rank {rank}: {result}")
