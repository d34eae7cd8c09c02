"""Optimizers of many kinds under ZeRO-1, 2 and 3: each is right, or refused when it is created."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from pairwise import short
from torch import nn
from torch.optim import Optimizer

import unisono as un

SHAPES: list[tuple[int, ...]] = [(101, 100), (2, 3), (5,)]
STEPS = 6


class Custom(Optimizer):
    """A step of `lr` times what `direction` returns for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make a step."""
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            for p, direction in zip(members, self.directions(group, members), strict=True):
                p.sub_(group["lr"] * direction)

    def directions(self, group: dict[str, Any], members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Return the directions of these parameters."""
        return [p.grad for p in members]


class OverNormOfAll(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Divide by the norm of all gradients of all groups."""
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.sqrt(sum((g.square().sum() for g in grads), torch.zeros(())) + 1e-12)
        return [p.grad / norm for p in members]


class OverNormOfEach(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Divide by the norm of each gradient."""
        return [p.grad / (p.grad.norm() + 1e-12) for p in members]


class AdaptiveStep(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Keep an estimate of the distance, in the group, from a sum over parameters."""
        total = sum(float(p.grad.abs().sum()) for p in members)
        group["d"] = max(group.get("d", 1e-6), total * 1e-3)
        return [group["d"] * p.grad for p in members]


class BeyondThreshold(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Treat long tensors by their mean."""
        return [p.grad - p.grad.mean() if p.numel() > 10_000 else p.grad for p in members]


class MatricesOnly(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Decay matrices, and not vectors."""
        return [p.grad + 0.1 * p if p.ndim > 1 else p.grad for p in members]


class Noise(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Add noise."""
        return [p.grad + torch.randn_like(p) for p in members]


class CounterOfGroup(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Divide by the number of steps, which the group has."""
        group["steps"] = group.get("steps", 0) + 1
        return [p.grad / group["steps"] for p in members]


class StateOfNoParameter(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Divide by the number of steps, which the state has under a key of its own."""
        if group is self.param_groups[0]:
            self.state["steps"] = self.state.get("steps", torch.zeros(())) + 1  # type: ignore[call-overload]
        return [p.grad / self.state["steps"] for p in members]  # type: ignore[index]


class CounterOfObject(Custom):
    steps = 0

    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Divide by the number of steps, which no state has."""
        self.steps += group is self.param_groups[0]
        return [p.grad / self.steps for p in members]


class Momentum(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Keep a momentum, and a number of steps, for each parameter."""
        found = []
        for p in members:
            state = self.state[p]
            state["momentum"] = state.get("momentum", torch.zeros_like(p)) * 0.5 + p.grad
            state["steps"] = state.get("steps", 0) + 1
            found.append(state["momentum"] / state["steps"])
        return found


MUST_SHARD: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Custom, {}),
    (CounterOfGroup, {}),
    (Momentum, {}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01}),
]
MUST_BE_REFUSED: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (OverNormOfAll, {}),
    (OverNormOfEach, {}),
    (AdaptiveStep, {}),
    (BeyondThreshold, {}),
    (MatricesOnly, {}),
    (Noise, {}),
    (CounterOfObject, {}),
    (torch.optim.LBFGS, {}),
    (torch.optim.Adafactor, {}),
]
EVERYWHERE = {Momentum, CounterOfGroup, torch.optim.AdamW, OverNormOfAll, Noise}
"""One optimizer for each reason to shard or refuse it, tried at all stages; the others at ZeRO-1 but for the soak."""
ALIKE = {
    torch.optim.Adam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
}
"""Those whose states are as AdamW's, numbers for each element and a count of steps: for the soak only."""
EITHER: list[tuple[type[Optimizer], dict[str, Any]]] = [(StateOfNoParameter, {})]
ALL = [*MUST_SHARD, *MUST_BE_REFUSED, *EITHER]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.values = nn.ParameterList(nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES)

    def forward(self, step: int) -> torch.Tensor:
        """Return a loss whose gradient is another one in each step; the last parameter has none in some."""
        generator = torch.Generator().manual_seed(step)
        scale = 10.0 ** (step % 4 - 2)
        used = self.values if step % 3 else list(self.values)[:2]
        distances = [(p - torch.randn(p.shape, generator=generator)).square().sum() for p in used]
        return torch.stack(distances).sum() * scale


def groups_of(model: Net) -> list[dict[str, Any]]:
    return [{"params": [model.values[0], model.values[1]]}, {"params": [model.values[2]], "lr": 0.05}]


def zero_1(model: Net, comm: un.Communicator, kind: type[Optimizer], options: Any) -> Optimizer:
    un.GradientAverager(model, comm)
    return un.sharding.ShardedOptimizer(kind, groups_of(model), comm, **options)


def zero_2(model: Net, comm: un.Communicator, kind: type[Optimizer], options: Any) -> Optimizer:
    return un.sharding.ShardedOptimizer(kind, groups_of(model), comm, shard_gradients=True, **options)


def zero_3(model: Net, comm: un.Communicator, kind: type[Optimizer], options: Any) -> Optimizer:
    return un.sharding.ShardedModel(model, comm).optimizer(kind, groups_of(model), **options)


KINDS: dict[str, Callable[[Net, un.Communicator, type[Optimizer], Any], Optimizer]] = {
    "ZeRO-1": zero_1,
    "ZeRO-2": zero_2,
    "ZeRO-3": zero_3,
}


def train(model: Net, optimizer: Optimizer) -> Optimizer:
    """Make the steps, and load the optimizer's state into itself between them."""
    for step in range(STEPS):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def outcome(comm: un.Communicator, kind: str, optimizer_class: type[Optimizer], options: Any) -> Any:
    """Return the parameters after training, and the first group's options; or the error of its creation."""
    model = Net()
    try:
        optimizer = KINDS[kind](model, comm, optimizer_class, options)
    except ValueError as error:
        return str(error)
    train(model, optimizer)
    if kind == "ZeRO-3":
        pieces = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        gathered = [torch.cat(comm.all_gather_object(piece)).view(s) for piece, s in zip(pieces, SHAPES, strict=True)]
    else:
        gathered = [p.detach().clone() for p in model.parameters()]
    return gathered, numbers_of(optimizer)


def numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    return {k: v for k, v in optimizer.param_groups[0].items() if isinstance(v, int | float)}


@pytest.mark.parametrize(
    ("optimizer_class", "kind"),
    [
        pytest.param(c, kind, marks=[pytest.mark.soak] * (c in ALIKE if kind == "ZeRO-1" else c not in EVERYWHERE))
        for c, _ in ALL
        for kind in KINDS
    ],
)
def test_each_kind_is_right_or_refused(kind: str, optimizer_class: type[Optimizer]) -> None:
    options = dict(ALL)[optimizer_class]
    results = un.launch(outcome, 2, "thread", args=(kind, optimizer_class, options))
    refused = [isinstance(result, str) for result in results]
    assert len(set(refused)) == 1
    if refused[0]:
        assert optimizer_class not in dict(MUST_SHARD), results[0]
        assert all(optimizer_class.__name__ in result for result in results)
        return
    assert optimizer_class not in dict(MUST_BE_REFUSED)
    alone = Net()
    expected = numbers_of(train(alone, optimizer_class(groups_of(alone), **options)))
    for found, numbers in results:
        assert numbers == pytest.approx(expected)
        for mine, wanted in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-4, atol=1e-5)


class LooksAtTheLargest(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Look at the largest element: empty slices have none."""
        return [p.grad for p in members if p.grad.amax().isfinite()]


class Unfinished(Custom):
    def directions(self, group: Any, members: Sequence[Any]) -> Iterable[torch.Tensor]:
        """Fail."""
        raise KeyError("unfinished")


@pytest.mark.parametrize(
    ("optimizer_class", "why"),
    [
        (
            LooksAtTheLargest,
            r"LooksAtTheLargest fails on a slice of a parameter \(amax.*\), so its states cannot",
        ),
        (Unfinished, "Unfinished failed in a trial step: 'unfinished'"),
    ],
)
def test_trial_says_what_failed(optimizer_class: type[Optimizer], why: str) -> None:
    with un.init() as comm, pytest.raises(ValueError, match=why):
        un.sharding.ShardedOptimizer(optimizer_class, Net().parameters(), comm)


def test_perturbation_of_parameters_by_sharded_gradients_is_an_error() -> None:
    """Sharpness-aware minimization reads p.grad, which has no elements under ZeRO-2."""

    def program(comm: un.Communicator) -> None:
        model = Net()
        optimizer = zero_2(model, comm, torch.optim.SGD, {"lr": 0.1})
        model(1).backward()
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"uses p\.grad, which is sharded"):
            model.values[0].add_(model.values[0].grad * 0.05)
        optimizer.zero_grad()

    un.launch(program, 2, "thread")


@short("backend, size", product(["thread", "shm"], [2, 3]), [("thread", 3), ("shm", 2)])
def test_gradient_that_a_hook_takes_away_is_an_error_on_all_ranks(backend: str, size: int) -> None:
    for error in un.launch(taking, size, backend, on_failure="continue"):
        assert "a hook has taken the gradient of 'parameter 0' away" in str(error)


def taking(comm: un.Communicator) -> None:
    weight = nn.Parameter(torch.zeros(4))
    weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, [weight], comm, shard_gradients=True, lr=1.0)
    weight.sum().backward()
    optimizer.step()


def test_rank_whose_pass_comes_later_is_told_why_another_one_has_left() -> None:
    gone = threading.Event()

    def program(comm: un.Communicator) -> None:
        weight = nn.Parameter(torch.zeros(4))
        if comm.rank == 0:
            weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        optimizer = un.sharding.ShardedOptimizer(torch.optim.SGD, [weight], comm, shard_gradients=True, lr=1.0)
        if comm.rank == 0:
            try:
                weight.sum().backward()
            finally:
                gone.set()
        assert gone.wait(20)
        weight.sum().backward()
        optimizer.step()

    for error in un.launch(program, 2, "thread", on_failure="continue"):
        assert "a hook has taken the gradient of 'parameter 0' away" in str(error)
