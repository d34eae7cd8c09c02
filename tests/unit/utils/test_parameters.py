"""Parameters that ranks cannot average are refused by one sentence, wherever they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meta_tensors import Hollow
from torch import nn

import unisono as un

USERS: dict[str, Callable[[nn.Module, un.Communicator], Any]] = {
    "GradientAverager": un.GradientAverager,
    "without init_sync": lambda model, comm: un.GradientAverager(model, comm, init_sync=False),
    "average_gradients": un.average_gradients,
    "broadcast_parameters": un.broadcast_parameters,
    "ZeRO-1": lambda model, comm: un.sharding.ShardedOptimizer(torch.optim.SGD, model, comm, lr=1.0, elementwise=True),
    "ZeRO-2": lambda m, comm: un.sharding.ShardedOptimizer(
        torch.optim.SGD, m, comm, shard_gradients=True, lr=1.0, elementwise=True
    ),
    "ZeRO-3": un.sharding.ShardedModel,
    "EMA": lambda model, comm: un.utils.EMA(model, 0.5, comm),
    "EMA alone": lambda model, comm: un.utils.EMA(model, 0.5),
    "LocalSGD": lambda model, comm: un.gradients.LocalSGD(model, comm, 2),
    "DiLoCo": lambda model, comm: un.gradients.DiLoCo(model, comm, 2),
    "DivergenceGuard": un.gradients.DivergenceGuard,
}


class Elsewhere(Hollow):
    """A tensor whose elements are another's."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(f"{func} on a wrapper")


@pytest.mark.parametrize("user", USERS)
def test_meta_device_is_named(user: str) -> None:
    def program(comm: un.Communicator) -> None:
        model = nn.Linear(2, 2, device="meta")
        with pytest.raises(ValueError, match=r"^'weight' is on the meta device.*to_empty"):
            USERS[user](model, comm)

    un.launch(program, 2, "thread")


@pytest.mark.parametrize("user", USERS)
def test_subclass_without_elements_is_named(user: str) -> None:
    def program(comm: un.Communicator) -> None:
        model = nn.Linear(2, 2, bias=False)
        model.weight = nn.Parameter(Elsewhere(torch.ones(2, 2)))
        with pytest.raises(ValueError, match=r"^'weight' is a \w+, whose elements are not in its own memory"):
            USERS[user](model, comm)

    un.launch(program, 2, "thread")


@pytest.mark.parametrize("user", [name for name in USERS if name != "DiLoCo"])
def test_subclass_of_parameter_is_accepted(user: str) -> None:
    class Named(nn.Parameter):
        """A parameter with a class of the caller's."""

    def program(comm: un.Communicator) -> float:
        model = nn.Linear(2, 2, bias=False)
        model.weight = Named(torch.ones(2, 2))
        USERS[user](model, comm)
        return sum(p.numel() for p in model.parameters())

    assert un.launch(program, 2, "thread") == [4, 4]
