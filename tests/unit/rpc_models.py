"""Models that ranks serve: their losses, gradients and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import unisono as un
from unisono.rpc import autograd

rpc = un.rpc

MODELS: dict[int, nn.Module] = {}
RAISING: dict[int, list[bool]] = {}
"""The model of each rank, and whether a hook of it raises."""


def made() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    numbers = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=numbers))
    return model


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def grads(model: nn.Module, gradients: dict[torch.Tensor, torch.Tensor]) -> list[torch.Tensor | None]:
    return [gradients.get(p) for p in model.parameters()]


def alone(*numbers: int, scale: float = 1.0) -> list[torch.Tensor]:
    """The gradients of one process for these batches."""
    model = made()
    for number in numbers:
        (model(batch(number)).square().mean() * scale).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def close(found: list[torch.Tensor | None], wanted: list[torch.Tensor]) -> bool:
    return all(a is not None and torch.allclose(a, b, 0, 1e-12) for a, b in zip(found, wanted, strict=True))


@rpc.expose
def forward(rank: int, number: int, anchor: torch.Tensor) -> torch.Tensor:
    """A loss; with the anchor it belongs to the caller's graph."""
    loss: torch.Tensor = MODELS[rank](batch(number)).square().mean()
    return loss + 0.0 * anchor


@rpc.expose
def found(rank: int, context: int) -> list[torch.Tensor | None]:
    return grads(MODELS[rank], autograd.get_gradients(context))


@rpc.expose
def behave(rank: int) -> None:
    RAISING[rank][0] = False


def losses(calls: list[tuple[int, int]]) -> torch.Tensor:
    anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
    futures = [rpc.rpc_async(rank, forward, (rank, number, anchor)) for rank, number in calls]
    return torch.stack([future.wait() for future in futures]).sum()


def serve(comm: un.Communicator, make: Callable[[], nn.Module] = made) -> nn.Module:
    """A model that the other ranks may call."""
    rpc.init(comm)
    MODELS[comm.rank] = make()
    return MODELS[comm.rank]


def on_rank_0(comm: un.Communicator, program: Callable[[], Any]) -> Any:
    comm.barrier()
    result = program() if comm.rank == 0 else None
    rpc.shutdown()
    return result


class Watch:
    """Gradients that the hooks of a parameter see."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.tensor_hook: list[torch.Tensor] = []
        self.post_hook: list[torch.Tensor] = []
        parameter.register_hook(self.tensor_hook.append)
        parameter.register_post_accumulate_grad_hook(self._after)

    def _after(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.post_hook.append(parameter.grad.clone())
