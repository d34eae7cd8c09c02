"""A small model, and its training with a sharded optimizer and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import unisono as un

__all__ = ["BOTH", "STEPS", "loss_of", "make_model", "shard", "train", "values", "whole"]

BOTH = pytest.mark.parametrize("sharded", [False, True], ids=["states", "gradients"])
STEPS = 4


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def shard(comm: Any, model: Any, cls: type[Optimizer] = SGD, *, sharded: bool, **options: Any) -> Any:
    """Return an optimizer for averaged gradients, with buckets of few parameters.

    Its class is not tried, which takes longer than these tests' training: `test_optimizer_kinds` is about that.
    """
    options = {"elementwise": True, **options}
    if not sharded:
        un.GradientAverager(model, comm)
        return un.sharding.ShardedOptimizer(cls, model, comm, **options)
    return un.sharding.ShardedOptimizer(cls, model, comm, shard_gradients=True, bucket_cap_mb=1e-4, **options)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range = range(STEPS)) -> list[torch.Tensor]:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return values(model)


def whole(ranks: int, cls: type[Optimizer], steps: int = STEPS, **options: Any) -> tuple[nn.Module, Optimizer]:
    """Train without shards, on the data of so many ranks."""
    model = make_model()
    optimizer = cls(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, rank) for rank in range(ranks)]).mean().backward()
        optimizer.step()
    return model, optimizer
