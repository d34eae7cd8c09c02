"""A training of ranks that take as many steps as they can, some of which kill themselves and are replaced."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import unisono as un

INTERVAL_S = 0.4


def new_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=draw)
    return inputs, inputs.sin().sum(1, keepdim=True) + 0.3 * torch.randn(count, 1, generator=draw)


def train(comm: un.Communicator, size: int, rounds: int, deaths: dict[int, int], folder: str) -> tuple[float, int]:
    """Return the loss on samples that no rank has trained on, and the number of recoveries of this process.

    Args:
        comm: The ranks.
        size: Their number.
        rounds: Number of intervals of the training.
        deaths: For a round the rank that dies in it.
        folder: A file for each death that took place.
    """
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    averager = un.gradients.DiLoCo(
        model, comm, timedelta(seconds=INTERVAL_S), outer_lr=0.7, outer_momentum=0.5, fragments=2, overlap_steps=2
    )
    training = un.elastic.Recovery(comm, averager=averager, optimizer=optimizer)
    draw = random.Random(os.getpid())
    recoveries = 0
    while averager.rounds < rounds:
        try:
            inputs, targets = data(16, draw.randrange(1 << 30))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            # The step's length, which differs among ranks.
            time.sleep(0.002 * (1 + 2 * (training.comm.rank == 1)))
            die_if_due(deaths.get(averager.rounds), averager.rounds, training.comm.rank, folder)
            if averager.step(len(inputs)):
                training.commit()
        except un.CommError:
            recoveries += 1
            training.recover(size=size)
    averager.finish()
    inputs, targets = data(4096, -1)
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs), targets).item(), recoveries


def die_if_due(who: int | None, now: int, rank: int, folder: str) -> None:
    if who == rank:
        try:
            (Path(folder) / str(now)).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
