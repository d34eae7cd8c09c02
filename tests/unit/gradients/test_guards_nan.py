"""The first rank and the first parameter that are no numbers are named, to all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unisono as un
from unisono.errors import MismatchError, NotFiniteError
from unisono.gradients import NanGuard, assert_finite
from unisono.testing import run_ranks

NAN, INF = float("nan"), float("inf")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def ended(program: Any, size: int = 3) -> list[NotFiniteError]:
    ends = run_ranks(program, size, "sim", on_failure="continue")
    assert all(isinstance(end, NotFiniteError) for end in ends), ends
    return ends


def poison(net: torch.nn.Module, value: float) -> None:
    """Replace the gradients of the last layer's bias and weight in later passes."""
    net[2].bias.register_hook(lambda gradient: gradient * value)  # type: ignore[index]  # a module of a list


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
def test_first_nan_is_named_before_averaging(hooks: bool, value: float) -> None:
    def program(comm: un.Communicator) -> None:
        net = model()
        if comm.rank == 1:
            poison(net, value)
        guard = NanGuard(net, comm)
        averager = un.GradientAverager(net, comm) if hooks else None
        net(torch.ones(2, 3)).sum().backward()
        if averager is None:
            un.average_gradients(net, comm)
        # By now all ranks have it.
        assert not net[2].bias.grad.isfinite().all()  # type: ignore[index]  # a module of a list
        guard.check()

    for rank, error in enumerate(ended(program)):
        assert "rank 1 has 1 of 1 elements that are not finite in the gradient of '2.bias'" in str(error)
        assert (error.rank, error.peer) == (rank, 1)


def test_first_nan_in_backward_is_named_with_all_ranks() -> None:
    def program(comm: un.Communicator) -> None:
        net = model()
        guard = NanGuard(net, comm)
        x = torch.ones(2, 3)
        if comm.rank > 0:
            x[0, 1] = NAN
        net(x).sum().backward()
        guard.check()

    # The bias after the last layer does not see its input; the weight of that layer is first.
    for error in ended(program, 4):
        assert "rank 1 has 4 of 4 elements that are not finite in the gradient of '2.weight'" in str(error)
        assert "so have ranks 2, 3" in str(error)


def test_each_check_covers_values_since_the_last() -> None:
    def program(comm: un.Communicator) -> list[str]:
        net, said = model(), []
        guard = NanGuard(net, comm)
        for step in range(4):
            x = torch.full((2, 3), NAN if step in (1, 2) and comm.rank == 0 else 1.0)
            net(x).sum().backward()
            if step == 1:
                continue
            try:
                guard.check()
                said.append("fine")
            except NotFiniteError as error:
                said.append("4 of 4" if "4 of 4" in str(error) else "bad")
        guard.remove()
        net(torch.full((2, 3), NAN)).sum().backward()
        guard.check()
        return said

    # Two passes came before the second check.
    assert run_ranks(program, 2, "sim") == [["fine", "4 of 4", "fine"]] * 2


def test_check_parameters_immediately() -> None:
    def program(comm: un.Communicator) -> None:
        net = model()
        assert_finite(net, comm)
        with torch.no_grad():
            if comm.rank == 2:
                net[0].weight[1, 2] = INF  # type: ignore[index]  # a module of a list
                net[2].weight[0, 0] = NAN  # type: ignore[index]  # a module of a list
        assert_finite(net, comm)

    for error in ended(program):
        assert "rank 2 has 1 of 12 elements that are not finite in '0.weight', the first such." in str(error)


def test_buffers_on_request() -> None:
    def program(comm: un.Communicator, buffers: bool) -> None:
        norm = torch.nn.BatchNorm1d(2)
        norm.running_var[1] = NAN  # type: ignore[index]  # a module of a list
        assert_finite(norm, comm, buffers=buffers)

    run_ranks(program, 2, "sim", False)
    with pytest.raises(NotFiniteError, match=r"'running_var'.*so has rank 1"):
        run_ranks(program, 2, "sim", True)


def test_sparse_gradients() -> None:
    def program(comm: un.Communicator) -> None:
        table = torch.nn.Embedding(5, 2, sparse=True)
        guard = NanGuard(table, comm)
        (table(torch.tensor([1, 1, 3])) * (NAN if comm.rank else 1.0)).sum().backward()
        guard.check()

    for error in ended(program, 2):
        assert "rank 1 has 4 of 10 elements that are not finite in the gradient of 'weight'" in str(error)


def test_models_must_agree() -> None:
    with pytest.raises(MismatchError):
        run_ranks(lambda comm: NanGuard(torch.nn.Linear(2 + comm.rank, 1), comm), 2, "sim")
