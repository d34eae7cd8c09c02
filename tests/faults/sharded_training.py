"""A small sharded training in which ranks die, join and leave; its weights depend on none of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import unisono as un

STEPS, SAMPLES = 5, 12


def make_model() -> nn.Module:
    """The same on every rank, with a tied weight and a buffer."""
    draw = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    model.append(nn.Identity())
    model[2].register_parameter("tied", model[4].weight)
    model.register_buffer("steps", torch.zeros(()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


def make_samples() -> torch.Tensor:
    return torch.randn(STEPS, SAMPLES, 4, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


class Training:
    """A model, an optimizer with states, a scheduler, and their recovery.

    Args:
        comm: The ranks.
        kind: "model" for ZeRO-3, "gradients" for ZeRO-2, "states" for ZeRO-1.
        redundancy: As for `Recovery`.
    """

    def __init__(self, comm: un.Communicator, kind: str, redundancy: int = 1) -> None:
        self.model, self.kind = make_model(), kind
        self.sharded = un.sharding.ShardedModel(self.model, comm) if kind == "model" else None
        parts: dict[str, Any] = {}
        if self.sharded is not None:
            self.optimizer: Any = self.sharded.optimizer(torch.optim.Adam, elementwise=True, lr=0.05)
            parts["model"] = self.sharded
        else:
            self.optimizer = un.sharding.ShardedOptimizer(
                torch.optim.Adam, self.model, comm, shard_gradients=kind == "gradients", elementwise=True, lr=0.05
            )
        if kind == "states":
            parts["averager"] = un.GradientAverager(self.model, comm, init_sync=False)
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.schedule = schedule
        self.going = un.elastic.Recovery(
            comm, redundancy=redundancy, **parts, optimizer=self.optimizer, schedule=schedule
        )

    def step(self, samples: torch.Tensor) -> None:
        mine = samples[self.going.step][self.going.comm.rank :: self.going.comm.size]
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(mine), mine.sum(1, keepdim=True)).backward()
        self.optimizer.step()
        self.schedule.step()
        self.going.commit()

    @contextmanager
    def whole(self) -> Iterator[None]:
        if self.sharded is None:
            yield
        else:
            with self.sharded.full_parameters():
                yield

    def weights(self) -> torch.Tensor:
        with self.whole():
            return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def train(comm: un.Communicator, kind: str, redundancy: int = 1, deaths: dict[int, int] | None = None) -> torch.Tensor:
    """Each step trains on its whole batch, divided between survivors; rank r dies before step `deaths[r]`."""
    me, failures, samples = comm.rank, 0, make_samples()
    training = Training(comm, kind, redundancy)
    while True:
        try:
            while training.going.step < STEPS:
                if (deaths or {}).get(me) == training.going.step:
                    raise KeyError("this rank is gone")
                training.step(samples)
            return training.weights()
        except un.CommError:
            failures += 1
            if failures > 20:
                raise
            training.going.recover()


def alone(kind: str) -> torch.Tensor:
    """The weights of one rank."""
    return un.launch(train, 1, "thread", (kind,))[0]
