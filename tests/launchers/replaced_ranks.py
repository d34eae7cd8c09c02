"""A sharded training whose ranks kill themselves, each once at a step and a moment of it, and are replaced."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import torch
from torch import nn

import unisono as un

MOMENTS = ("before", "backward", "optimizer")

Death = tuple[int, int, str]
"""Step, rank in the communicator of that time, and the moment in the step."""


def random_deaths(number: int, ranks: int, seed: int) -> tuple[list[Death], int]:
    """Return deaths at different steps, and the number of steps."""
    draw = random.Random(seed)
    steps = number + number // 4 + 2
    chosen = sorted(draw.sample(range(steps), number))
    return [(step, draw.randrange(ranks), draw.choice(MOMENTS)) for step in chosen], steps


def make_model() -> nn.Module:
    draw = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


def train(comm: un.Communicator, size: int, steps: int, deaths: list[Death], folder: str) -> list[float]:
    """Return the weights after all steps. A rank's samples depend on its number only."""
    model = make_model()
    sharded = un.sharding.ShardedModel(model, comm)
    optimizer = sharded.optimizer(torch.optim.Adam, lr=0.05, elementwise=True)
    training = un.elastic.Recovery(comm, model=sharded, optimizer=optimizer)
    while training.step < steps:
        try:
            one_step(training, model, optimizer, deaths, folder)
        except un.CommError:
            training.recover(size=size)
    while True:
        try:
            with sharded.full_parameters():
                return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()
        except un.CommError:
            training.recover(size=size)


def one_step(
    training: un.elastic.Recovery, model: nn.Module, optimizer: torch.optim.Optimizer, deaths: list[Death], folder: str
) -> None:
    rank = training.comm.rank
    draw = torch.Generator().manual_seed(100 * training.step + rank)
    mine = torch.randn(8, 4, generator=draw, dtype=torch.float64)
    die_if_due((training.step, rank, "before"), deaths, folder)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True)).backward()
    die_if_due((training.step, rank, "backward"), deaths, folder)
    optimizer.step()
    die_if_due((training.step, rank, "optimizer"), deaths, folder)
    training.commit()


def die_if_due(now: Death, deaths: list[Death], folder: str) -> None:
    if now in deaths:
        try:
            (Path(folder) / "{}-{}-{}".format(*now)).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
