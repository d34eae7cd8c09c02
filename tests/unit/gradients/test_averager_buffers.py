"""Buffers that an averager broadcasts: in `join`, those that a forward assigns, and those that a graph still holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from averager_helpers import RANKS
from torch import nn

import unisono as un
from unisono.testing import pool

EACH = pytest.mark.parametrize(("backend", "size"), RANKS)

Values = list[list[float]]


class Counted(nn.Module):
    """Statistics in a buffer that is written, and in one that is assigned; the result depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(2, eps=1.0), nn.Linear(2, 1)
        self.register_buffer("written", torch.ones(2))
        self.register_buffer("assigned", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written.mul_(0.5).add_(x.mean(0))
        self.assigned = 0.5 * self.assigned + x.mean(0)
        out: torch.Tensor = self.layer(self.norm(x + self.written) * self.assigned)
        return out


class Kept(Counted):
    """Its graph holds the buffer that it has written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.written.sum()


def made(make: Callable[[], nn.Module] = Counted) -> nn.Module:
    numbers = torch.Generator().manual_seed(0)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=numbers)
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 2, dtype=torch.float64, generator=numbers)


def buffers(model: nn.Module) -> Values:
    return [buffer.flatten().tolist() for buffer in model.buffers()]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@EACH
@pytest.mark.parametrize("steps", [(4, 1, 2), (0, 3, 1), (1, 2, 4)])
def test_buffers_in_join_come_from_a_rank_that_has_data(backend: str, size: int, steps: tuple[int, ...]) -> None:
    counts = steps[:size]

    def program(comm: un.Communicator) -> list[Values]:
        model, found = made(), []
        averager = un.GradientAverager(model, comm, broadcast_buffers=True)
        with averager.join():
            for step in range(counts[comm.rank]):
                model(batch(comm.rank, step)).sum().backward()
                found.append(buffers(model))
        found.append(buffers(model))
        averager.remove()
        return found

    model, wanted = made(), []
    for step in range(max(counts)):
        model(batch(next(rank for rank, count in enumerate(counts) if count > step), step))
        wanted.append(buffers(model))
    for found, count in zip(pool(backend, 3).run(program, size=size), counts, strict=True):
        assert found == [*wanted[:count], wanted[-1]]


@EACH
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_may_come_before_their_backwards(backend: str, size: int, order: tuple[int, int]) -> None:
    def losses(model: nn.Module, rank: int) -> list[torch.Tensor]:
        return [model(batch(rank, step)).square().sum() for step in range(2)]

    def program(comm: un.Communicator) -> tuple[list[list[torch.Tensor]], Values]:
        model, found = made(), []
        averager = un.GradientAverager(model, comm, broadcast_buffers=True)
        made_losses = losses(model, comm.rank)
        for step in order:
            model.zero_grad()
            made_losses[step].backward()
            found.append(gradients(model))
        averager.remove()
        return found, buffers(model)

    models = [made() for _ in range(size)]
    alone = [losses(model, rank) for rank, model in enumerate(models)]
    wanted = [
        [torch.autograd.grad(loss[step], list(model.parameters())) for loss, model in zip(alone, models, strict=True)]
        for step in order
    ]
    for found, values in pool(backend, 3).run(program, size=size):
        assert values == buffers(models[0])
        for one, by_rank in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, [torch.stack(parts).mean(0) for parts in zip(*by_rank, strict=True)])


@EACH
def test_a_graph_that_is_kept_keeps_its_buffers(backend: str, size: int) -> None:
    """Its second backward pass finds the rank's own values, which the first one has replaced in the model."""

    def program(comm: un.Communicator) -> list[list[torch.Tensor]]:
        model, found = made(Kept), []
        averager = un.GradientAverager(model, comm, broadcast_buffers=True)
        loss = model(batch(comm.rank, 0)).square().sum()
        for step in range(2):
            model.zero_grad()
            loss.backward(retain_graph=step == 0)
            found.append(gradients(model))
        averager.remove()
        return found

    models = [made(Kept) for _ in range(size)]
    for rank, model in enumerate(models):
        model(batch(rank, 0)).square().sum().backward()
    wanted = [torch.stack(parts).mean(0) for parts in zip(*map(gradients, models), strict=True)]
    for found in pool(backend, 3).run(program, size=size):
        torch.testing.assert_close(found, [wanted, wanted])
