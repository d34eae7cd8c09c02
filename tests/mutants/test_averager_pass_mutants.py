"""Faults in what an averager knows of passes and of parameters, each of which one short program must notice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.gradients import parameter_registry
from unisono.gradients.averager_comms import AveragerComms
from unisono.gradients.averaging import Averaging
from unisono.gradients.bucket import BucketContents
from unisono.gradients.buckets import Buckets
from unisono.gradients.caller_gradients import SavedGradients
from unisono.gradients.parameter_registry import ParameterRegistry
from unisono.gradients.reduction import Reduction
from unisono.gradients.weights import Weights
from unisono.testing import run_ranks
from unisono.transports.thread import ThreadTransport
from unisono.utils import backward_pass
from unisono.utils import parameters as model_parameters
from unisono.utils.backward_pass import BackwardTracker

TINY = {"bucket_cap_mb": 4 / 2**20}
"""One parameter a bucket."""


class PlannedError(Exception):
    """The error that a hook raises on purpose."""


def pair() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    return model


def found(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


@contextmanager
def raising(where: torch.Tensor, action: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A pass inside has to come to this tensor's gradient, and raises there, after an action."""

    def fail(gradient: torch.Tensor) -> None:
        action()
        raise PlannedError

    handle = where.register_hook(fail)
    with pytest.raises(PlannedError):
        yield
    handle.remove()


def run_inside(model: nn.Sequential, hidden: torch.Tensor, factor: float) -> None:
    """Run a pass of the first layer's weight in a hook of another pass."""

    def again(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            (model[0].weight * factor).sum().backward()

    hidden.register_hook(again)


def passes(comm: un.Communicator) -> None:
    """Nested and failed passes, with weights and with gradients from before, which ranks 0 and 1 make alike."""
    model, mine = pair(), torch.tensor([comm.rank + 1.0])
    averager = un.GradientAverager(model, comm, **TINY)
    averager.weight(3.0 - 2.0 * comm.rank)
    out = model(mine)
    # Of the outer pass nothing has come when the inner one ends.
    run_inside(model, out, comm.rank + 1.0)
    out.sum().backward()
    assert found(model) == [2.5, 1.25], "a pass in a hook, weighted"
    model.zero_grad()
    checkpoint(model, mine.clone().requires_grad_(), use_reentrant=True).sum().backward()
    assert found(model) == [1.5, 1.5], "re-entrant checkpointing"
    # Not zeroed.
    averager.weight(3.0 - 2.0 * comm.rank)
    with raising(model[0].weight):
        model(mine).sum().backward()
    assert found(model) == [1.5, 1.5], "restored to means"
    model(mine).sum().backward()
    assert found(model) == [2.75, 2.75], "means and what came, weighted"
    model.zero_grad()
    with averager.no_sync():
        model(mine).sum().backward()
        model(mine).sum().backward()
        with raising(model[0].weight):
            model(mine).sum().backward()
        assert found(model) == [2.0 * mine.item()] * 2, "restored in no_sync"
    with raising(model[0].weight):
        model(mine).sum().backward()
    assert found(model) == [2.0 * mine.item()] * 2, "restored to what was accumulated"
    model(mine).sum().backward()
    assert found(model) == [4.5, 4.5], "what was accumulated and what came"
    averager.remove()


def left(comm: un.Communicator) -> None:
    """Rank 0 fails when its first bucket has left; rank 1 before, and is in its next pass already."""
    model, mine, joined = pair(), torch.tensor([comm.rank + 1.0]), JOINED
    averager = un.GradientAverager(model, comm, **TINY)
    model(mine).sum().backward()
    model.zero_grad()
    if comm.rank == 0:
        # By then the first bucket has left, and rank 1 has joined it in its second try.
        with raising(model[0].weight, lambda: joined.wait(5) or None):
            model(mine).sum().backward()
    else:
        with raising(model[1].weight):
            model(mine).sum().backward()
        model[0].weight.register_hook(lambda gradient: joined.set())
    assert found(model) == [None, None], "restored"
    model(mine).sum().backward()
    assert found(model) == [1.5, 1.5], "after a failed pass"
    averager.remove()


def alone(comm: un.Communicator) -> None:
    """Rank 1 fails alone when its first bucket has left: rank 0 fails too, and both go on."""
    model, mine = pair(), torch.tensor([comm.rank + 1.0])
    averager = un.GradientAverager(model, comm, **TINY)
    model(mine).sum().backward()
    model.zero_grad()
    averager.weight(3.0 - 2.0 * comm.rank)
    if comm.rank == 1:
        with raising(model[0].weight):
            model(mine).sum().backward()
    else:
        with pytest.raises(un.errors.AbortedError):
            model(mine).sum().backward()
    assert found(model) == [None, None], "dropped"
    model(mine).sum().backward()
    assert found(model) == [1.25, 1.25], "after a failed pass, weighted"
    averager.remove()


def parameters(comm: un.Communicator) -> None:
    """Models that change in ways that are an error, and in one that is none."""
    model, x = pair(), torch.ones(1)
    averager = un.GradientAverager(model, comm, **TINY)
    torch.func.functional_call(model, {"0.weight": torch.ones(1, 1, requires_grad=True)}, (x,))
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(1, 1)))
    with pytest.raises(RuntimeError, match=r"'0\.weight' was swapped"):
        model(x)
    averager.remove()
    averager = un.GradientAverager(model, comm, **TINY)
    model(x).sum().backward()
    model[0].weight.grad, model[1].weight.grad = model[1].weight.grad, model[0].weight.grad
    with pytest.raises(RuntimeError, match="clone"):
        model(x).sum().backward()
    model.zero_grad()
    comm.barrier()
    if comm.rank == 1:
        model.requires_grad_(False)
        model.append(nn.Linear(1, 1))
        with pytest.raises(RuntimeError, match=r"'2\.weight'"):
            model(x)
    else:
        with pytest.raises(un.errors.AbortedError, match=r"'2\.weight'"):
            model(x).sum().backward()
    averager.remove()


JOINED = threading.Event()


@pytest.fixture(autouse=True)
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets leave while others fill, as on a network."""
    monkeypatch.setattr(ThreadTransport, "background", True)
    JOINED.clear()


def drops_no_more(self: BackwardTracker, number: int) -> None:
    self._tasks.pop(number, None)


def forgets_the_outer_pass(self: BackwardTracker, number: int) -> None:
    if backward_pass.current_pass() < 0:
        original_abandon(self, number)


def leaves_p_grad(self: SavedGradients, *given: Any) -> None:
    original_save(self, *given)
    for index, grad in self.aside.items():
        self._parameters[index].grad = grad


def uses_the_weight_up(self: Weights) -> float:
    factor = original_factor(self)
    self._mine = None
    return factor


def consumes_on_failure(self: Averaging) -> None:
    self._weights.forget()
    original_fail(self)


def fails_unsent(self: Averaging) -> None:
    self._reduction.sent = 0
    original_fail(self)


def keeps_no_copies(self: Reduction, *given: Any, **_: Any) -> None:
    original_reduction(self, *given)


original_abandon, original_save = BackwardTracker.abandon, SavedGradients.__init__
original_factor, original_fail = Weights.shared_factor, Averaging.fail
original_reduction = Reduction.__init__


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


MUTANTS: list[tuple[Callable[[un.Communicator], None], Any, str, Any]] = [
    (passes, backward_pass, "_is_nested", lambda: False),
    (passes, BackwardTracker, "abandon", drops_no_more),
    (passes, BackwardTracker, "abandon", forgets_the_outer_pass),
    (passes, SavedGradients, "restore", nothing),
    (passes, SavedGradients, "merge", nothing),
    (passes, SavedGradients, "__init__", leaves_p_grad),
    (passes, Buckets, "_is_within", lambda self, index, grad: False),
    (passes, Averaging, "fail", consumes_on_failure),
    (left, BucketContents, "can_rewind", lambda self: False),
    (left, BucketContents, "rewind", lambda self: setattr(self, "started", False)),
    (alone, Weights, "shared_factor", uses_the_weight_up),
    (alone, Averaging, "fail", fails_unsent),
    (left, Reduction, "__init__", keeps_no_copies),
    (alone, AveragerComms, "abort_pass", nothing),
    (parameters, ParameterRegistry, "check", nothing),
    (parameters, parameter_registry, "_implementation", lambda parameter: 0),
    (parameters, model_parameters, "in_functional_call", lambda: False),
    (parameters, AveragerComms, "abort_all", nothing),
    (parameters, Buckets, "_is_within", lambda self, index, grad: True),
]


@pytest.mark.parametrize("program", [passes, left, alone, parameters])
def test_unmodified_averager_passes(program: Callable[[un.Communicator], None]) -> None:
    assert run_ranks(program, 2) == [None, None]


@pytest.mark.parametrize(("program", "owner", "name", "mutant"), MUTANTS)
def test_faulty_averager_is_detected(
    program: Callable[[un.Communicator], None], owner: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, un.CommError, RuntimeError, pytest.fail.Exception)):
        run_ranks(program, 2, timeout=0.5)
