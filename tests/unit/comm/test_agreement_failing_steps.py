"""Errors of one rank in `optimizer.step()`, caught or not, end the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from pairwise import short
from torch import nn

import unisono as un
from unisono.errors import AbortedError, CommError
from unisono.testing import pool

LONG_S = 60
"""Timeout of the ranks: far over what an error may take to reach them, and over the tests' own timeout."""


def zero_1(model: nn.Module, comm: un.Communicator) -> torch.optim.Optimizer:
    un.GradientAverager(model, comm)
    return un.sharding.ShardedOptimizer(torch.optim.SGD, model, comm, lr=0.1, elementwise=True)


def zero_2(model: nn.Module, comm: un.Communicator) -> torch.optim.Optimizer:
    return un.sharding.ShardedOptimizer(torch.optim.SGD, model, comm, shard_gradients=True, lr=0.1, elementwise=True)


def zero_3(model: nn.Module, comm: un.Communicator) -> torch.optim.Optimizer:
    return un.sharding.ShardedModel(model, comm).optimizer(torch.optim.SGD, lr=0.1, elementwise=True)


KINDS: dict[str, Callable[[nn.Module, un.Communicator], torch.optim.Optimizer]] = {
    "ZeRO-1": zero_1,
    "ZeRO-2": zero_2,
    "ZeRO-3": zero_3,
}


def train(comm: un.Communicator, kind: str, catches: bool) -> list[str]:
    """Train until the last rank's optimizer raises; return the errors of this rank's steps."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = KINDS[kind](model, comm)
    inner = getattr(optimizer, "_shards", optimizer)
    errors = []
    for number in range(4):
        if number == 1 and comm.rank == comm.size - 1:
            inner.register_step_pre_hook(raising)
        try:
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        except (CommError, OverflowError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            if not catches:
                raise
    return errors


def raising(*_: object) -> None:
    raise OverflowError("no such step")


@short(
    "kind, backend", product(KINDS, ["thread", "shm", "gloo"]), [*zip(KINDS, ["thread", "shm", "gloo"], strict=True)]
)
def test_error_that_is_caught_ends_the_other_ranks(backend: str, kind: str) -> None:
    *others, failing = pool(backend, 3, timeout=LONG_S).run(train, kind, True)
    assert failing[0] == "OverflowError: no such step"
    # No rank trains on: its part or that of another rank may lack the step.
    assert len(failing) == 3
    for found in others:
        assert len(found) >= 2
        assert all("rank 2 aborted" in text and "OverflowError: no such step" in text for text in found)


@pytest.mark.parametrize("kind", KINDS)
def test_error_that_is_not_caught_ends_the_other_ranks(kind: str) -> None:
    first, second = un.launch(train, 2, "shm", args=(kind, False), timeout=LONG_S, on_failure="continue")
    assert isinstance(second, OverflowError)
    assert isinstance(first, CommError)
    assert "OverflowError: no such step" in str(first)


def stumble(comm: un.Communicator, kind: str) -> list[Any]:
    """Make a step, one whose closure raises on one rank, and another one."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = KINDS[kind](model, comm)
    losses: list[Any] = []

    def closure(fails: bool) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 2)).sum()
        loss.backward()
        if fails:
            raise OverflowError("no such loss")
        return loss

    for fails in (False, comm.rank == 1, False):
        try:
            losses.append(optimizer.step(lambda fails=fails: closure(fails)).item())
        except (AbortedError, OverflowError) as error:
            losses.append(str(error))
    return losses


@pytest.mark.parametrize("backend", ["thread", "gloo"])
@pytest.mark.parametrize("kind", ["ZeRO-1", "ZeRO-2"])
def test_error_before_the_update_drops_one_step_on_all_ranks(backend: str, kind: str) -> None:
    first, second = pool(backend, 3, timeout=LONG_S).run(stumble, kind, size=2)
    assert "rank 1 failed in optimizer.step()" in first[1]
    assert "OverflowError: no such loss" in first[1]
    assert second[1] == "no such loss"
    for losses in (first, second):
        # One step of 0.1 along a gradient of ones, and none that was dropped.
        # The difference may be small, and the weights are of float32.
        assert losses[2] == pytest.approx(losses[0] - 0.2, abs=1e-6)


def leave(comm: un.Communicator, kind: str) -> str:
    model = nn.Linear(2, 1)
    sharded = un.sharding.ShardedModel(model, comm) if kind == "ZeRO-3" else None
    if sharded is not None:
        owner: Any = sharded
    else:
        owner = un.GradientAverager(model, comm) if kind == "averager" else KINDS[kind](model, comm)
    if comm.rank == 0:
        owner.abort("the disk is full")

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        if isinstance(owner, torch.optim.Optimizer):
            owner.step()

    with pytest.raises(AbortedError) as caught:
        step()
    return str(caught.value)


@short(
    "kind, backend",
    product(["averager", "ZeRO-2", "ZeRO-3"], ["thread", "shm", "gloo"]),
    [("averager", "gloo"), ("ZeRO-2", "thread"), ("ZeRO-3", "shm")],
)
def test_abort_ends_all_ranks(backend: str, kind: str) -> None:
    for text in pool(backend, 3, timeout=LONG_S).run(leave, kind):
        assert "rank 0 aborted" in text
        assert "the disk is full" in text
