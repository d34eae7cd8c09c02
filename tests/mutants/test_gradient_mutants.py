"""Ways to average gradients and to share parameters that are known to be wrong, each killed by the public checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from assertions import assertion_of

import unisono as un
from unisono.gradients import average
from unisono.testing import run_ranks
from unisono.testing.gradients import Averager, check_averages, check_shares

SIZE = 3


def checks_the_type(model: torch.nn.Module, comm: un.Communicator) -> None:
    """As the tutorial had it: a Parameter is a tensor, but its type is another one."""
    for parameter in model.parameters():
        if type(parameter) is torch.Tensor and parameter.grad is not None:
            comm.all_reduce(parameter.grad, "avg")


def sums(model: torch.nn.Module, comm: un.Communicator) -> None:
    """Forgets to divide."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            comm.all_reduce(parameter.grad)


def averages_a_copy(model: torch.nn.Module, comm: un.Communicator) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            comm.all_reduce(parameter.grad.clone(), "avg")


def averages_the_weights(model: torch.nn.Module, comm: un.Communicator) -> None:
    average.average_gradients(model, comm)
    with torch.no_grad():
        for parameter in model.parameters():
            comm.all_reduce(parameter, "avg")


def thaws(model: torch.nn.Module, comm: un.Communicator) -> None:
    """Gives every parameter a gradient, a frozen one too."""
    average.average_gradients(model, comm)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (checks_the_type, "the gradient of turned is .* not the mean, 2.0"),
        (sums, r"the gradient of turned is \[6.0\]"),
        (averages_a_copy, "the gradient of turned is .* not the mean"),
        (averages_the_weights, "has changed; only its gradient should"),
        (thaws, "frozen is frozen"),
    ],
)
def test_wrong_averages_are_killed(mutant: Averager, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        run_ranks(lambda comm: check_averages(mutant, comm), SIZE)


def shares_parameters_only(model: torch.nn.Module, comm: un.Communicator) -> None:
    """Forgets the buffers."""
    un.broadcast_parameters(list(model.parameters()), comm)


def shares_what_is_trained(model: torch.nn.Module, comm: un.Communicator) -> None:
    """Forgets what is frozen."""
    un.broadcast_parameters([p for p in model.parameters() if p.requires_grad], comm)


def replaces(model: torch.nn.Module, comm: un.Communicator) -> None:
    """Leaves an optimizer, which holds the old parameters, behind."""
    un.broadcast_parameters(model, comm)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (shares_parameters_only, "counter is"),
        (shares_what_is_trained, "frozen is"),
        (replaces, "is in other memory"),
    ],
)
def test_wrong_shares_are_killed(mutant: Averager, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        run_ranks(lambda comm: check_shares(mutant, comm), SIZE)


def test_bucket_without_its_last_tensor_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = average.flat_apply

    def flat_apply(bucket: Sequence[torch.Tensor], action: Callable[[torch.Tensor], object]) -> None:
        right(bucket[:-1] if len(bucket) > 1 else bucket, action)

    monkeypatch.setattr(average, "flat_apply", flat_apply)
    with pytest.raises(AssertionError, match=r"the gradient of .* not the mean"):
        run_ranks(lambda comm: check_averages(un.average_gradients, comm), SIZE)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_correct_implementations_survive(size: int) -> None:
    rights = (partial(check_averages, un.average_gradients), partial(check_shares, un.broadcast_parameters))
    assert [assertion_of(run_ranks, right, size) for right in rights] == ["", ""]
