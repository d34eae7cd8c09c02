"""The first rank and the first parameter that are no numbers are named, to all."""

from __future__ import annotations

import copy
import pickle
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


def assign(net: torch.nn.Sequential) -> None:
    net.load_state_dict({name: tensor.clone() for name, tensor in net.state_dict().items()}, assign=True)


def replace(net: torch.nn.Sequential) -> None:
    net[2].weight = torch.nn.Parameter(torch.ones(1, 4))


def insert(net: torch.nn.Sequential) -> None:
    net.requires_grad_(False)
    net.insert(3, torch.nn.Linear(1, 1))


def resize(net: torch.nn.Sequential) -> None:
    net[2] = torch.nn.Identity()
    net[0].weight.data = torch.ones(5, 3)
    net[0].bias.data = torch.ones(5)


CHANGES = {
    "thawed": lambda net: net.requires_grad_(True),
    "assigned": assign,
    "replaced": replace,
    "added": insert,
    "removed": lambda net: net.pop(2),
    "converted": lambda net: net.double(),
    "resized": resize,
    "frozen but for one": lambda net: net[2].bias.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["alone", "average_gradients", "averager"])
def test_a_model_that_changes_is_followed(change: str, how: str) -> None:
    """The rank is the right one after averaging too, where all have it."""

    def program(comm: un.Communicator) -> None:
        net = model()
        if change == "thawed":
            net.requires_grad_(False)
        guard = NanGuard(net, comm)
        CHANGES[change](net)
        if how == "averager":
            un.GradientAverager(net, comm)
        x = torch.full((2, 3), NAN if comm.rank == 1 else 1.0, dtype=next(net.parameters()).dtype)
        net(x).sum().backward()
        if how == "average_gradients":
            un.average_gradients(net, comm)
        guard.check()

    for error in ended(program, 2):
        assert error.peer == 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "backend", ["thread", *(pytest.param(b, marks=pytest.mark.soak) for b in ("shm", "tcp", "gloo"))]
)
@pytest.mark.parametrize("change", ["thawed", "assigned"])
def test_changes_between_processes(backend: str, size: int, change: str) -> None:
    def program(comm: un.Communicator) -> int:
        net = model()
        net.requires_grad_(change != "thawed")
        guard = NanGuard(net, comm)
        CHANGES[change](net)
        net(torch.full((2, 3), NAN if comm.rank == size - 1 else 1.0)).sum().backward()
        try:
            guard.check()
        except NotFiniteError as error:
            return error.peer
        return -1

    assert un.testing.pool(backend).run(program, size=size) == [size - 1] * size


def test_gradients_that_no_hook_has_seen() -> None:
    """Those of a parameter that was replaced, and used without a forward of the whole model."""

    def program(comm: un.Communicator) -> None:
        net = model()
        guard = NanGuard(net, comm)
        replace(net)
        (net[2].weight.sum() * (NAN if comm.rank else 1.0)).backward()
        guard.check()

    for error in ended(program, 3):
        assert "rank 1 has 4 of 4 elements that are not finite in the gradient of '2.weight'" in str(error)
        assert "so has rank 2" in str(error)


def test_a_parameter_that_other_ranks_do_not_have_is_named() -> None:
    def program(comm: un.Communicator) -> None:
        net = model()
        guard = NanGuard(net, comm)
        if comm.rank:
            net.requires_grad_(False)
            net.add_module("last", torch.nn.Linear(1, 1))
        net(torch.full((2, 3), NAN if comm.rank else 1.0)).sum().backward()
        guard.check()

    for error in ended(program, 2):
        assert "in the gradient of 'last.weight'" in str(error)


def test_copies_and_models_called_with_other_tensors_are_not_watched() -> None:
    def program(comm: un.Communicator) -> None:
        net = model()
        guard = NanGuard(net, comm)
        x = torch.full((2, 3), NAN)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            replace(other)
            other(x).sum().backward()
        others = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        torch.func.functional_call(net, others, x).sum().backward()
        guard.check()

    run_ranks(program, 2, "sim")


def test_models_must_agree() -> None:
    with pytest.raises(MismatchError):
        run_ranks(lambda comm: NanGuard(torch.nn.Linear(2 + comm.rank, 1), comm), 2, "sim")
