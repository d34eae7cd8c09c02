"""Memory of freed parameters of a ShardedModel: what would read it works, or is one error, and never crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_models import trained_equally
from torch import nn
from torch.nn.functional import linear

import unisono as un
from unisono.sharding import ShardedModel


class Using(nn.Module):
    """Three units, the middle of which does something with its weight."""

    def __init__(self, use: Callable[[Any, torch.Tensor], Any], finish: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Linear(4, 4), Middle(use), nn.Linear(4, 4)])
        self.finish = finish

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.units[0](x)
        return self.units[2](self.finish((x, self.units[1](x))))


class Middle(nn.Module):
    def __init__(self, use: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.eye(4) + 0.1), use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self.weight, x)


class Holder:
    """Output in which no tensor is found."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def clamped(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weight.clamp_(max=1.0)
    return linear(x, weight)


WORKING: dict[str, Any] = {
    "returns its weight": (lambda weight, x: weight, lambda both: linear(*both).tanh() * both[1].sum()),
    "returns a view of it": (lambda weight, x: weight[1:3], lambda both: both[0] * both[1].sum(0).sin()),
    "returns a detached view": (lambda weight, x: linear(x, weight) + weight.detach()[0], lambda both: both[1].sin()),
}
RAISING: dict[str, Any] = {
    "detaches its weight": (lambda weight, x: linear(linear(x, weight.detach()).sin(), weight), lambda both: both[1]),
    "hides its output": (lambda weight, x: Holder(linear(x, weight)), lambda both: both[1].tensor),
    "writes to its weight": (clamped, lambda both: both[1]),
}


@pytest.mark.parametrize("how", WORKING)
def test_views_of_parameters_may_be_returned(how: str) -> None:
    assert trained_equally(Using(*WORKING[how]).double(), torch.ones(3, 4).double())


@pytest.mark.parametrize("how", RAISING)
def test_what_would_read_freed_memory_raises(how: str) -> None:
    def program(comm: un.Communicator) -> str:
        model = Using(*RAISING[how])
        sharded = ShardedModel(model, comm)
        with pytest.raises(RuntimeError, match=r"in ?place|was changed") as caught:
            model(torch.ones(3, 4)).sum().backward()
        sharded.remove()
        model.units[1].use, model.finish = WORKING["returns its weight"]
        model(torch.ones(3, 4)).sum().backward()
        return str(caught.value)

    assert len(un.launch(program, 2, "sim")) == 2


@pytest.mark.parametrize("change", ["remove", "full_parameters", "step"])
def test_a_backward_through_changed_parameters_raises(change: str) -> None:
    def program(comm: un.Communicator) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        sharded = ShardedModel(model, comm)
        optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1, elementwise=True)
        loss = model(torch.ones(3, 4)).sum()
        if change == "remove":
            sharded.remove()
        elif change == "step":
            optimizer.step()
        else:
            with sharded.full_parameters(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            return
        with pytest.raises(RuntimeError, match=r"changed between|modified by an inplace operation"):
            loss.backward()

    un.launch(program, 1, "thread")
