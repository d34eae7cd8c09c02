"""Gradients that wait: what `p.grad` holds is the caller's until a pass adds to it on some rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from averager_helpers import RANKS
from pairwise import short
from torch import nn

import unisono as un
from unisono.testing import pool

EACH = pytest.mark.parametrize(("backend", "size"), RANKS)
LAYOUTS = ["flat", "offset", "strided", "apart"]
GRAPHS = pytest.mark.filterwarnings("ignore:Using backward:UserWarning", "ignore:The .grad attribute:UserWarning")


class PlannedError(Exception):
    """Raised by a hook on purpose."""


def vectors(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(count)]


def add(parameters: Sequence[torch.Tensor], gradient: float) -> None:
    """Run a pass that adds this number to the gradient of each parameter."""
    torch.stack([(p * gradient).sum() for p in parameters]).sum().backward()


def value(parameter: torch.Tensor) -> float:
    """The number that all elements of a gradient are."""
    assert parameter.grad is not None
    (number,) = parameter.grad.detach().unique().tolist()
    return float(number)


def mean(size: int, number: Callable[[int], float], average: str = "mean") -> float:
    """The mean, or the sum, of a number of each rank."""
    total = sum(map(number, range(size)))
    return total / size if average == "mean" else total


# -- frozen, and not reached -----------------------------------------------------------------------
@EACH
@pytest.mark.parametrize("average", ["mean", "sum"])
def test_gradients_wait_for_a_pass_of_their_parameter(backend: str, size: int, average: str) -> None:
    def program(comm: un.Communicator) -> list[tuple[float, float]]:
        one, other = vectors(2)
        mine, found = comm.rank + 1.0, []
        averager = un.GradientAverager([one, other], comm, average=average)
        add([one, other], mine)
        found.append((value(one), value(other)))
        one.requires_grad_(False)
        add([other], mine)
        found.append((value(one), value(other)))
        # A value of the rank's own, which no pass reaches, though the parameter is trained again.
        one.requires_grad_(True)
        one.grad = torch.full_like(one, mine / 3)
        add([other], mine)
        found.append((value(one), value(other)))
        add([one], mine)
        found.append((value(one), value(other)))
        averager.remove()
        return found

    first = mean(size, lambda rank: rank + 1.0, average)
    second = mean(size, lambda rank: first + rank + 1.0, average)
    third = mean(size, lambda rank: second + rank + 1.0, average)
    last = mean(size, lambda rank: (rank + 1.0) / 3 + rank + 1.0, average)
    for rank, found in enumerate(pool(backend, 3).run(program, size=size)):
        wanted = [(first, first), (first, second), ((rank + 1.0) / 3, third), (last, third)]
        assert found == [pytest.approx(pair) for pair in wanted]


@EACH
@GRAPHS
@pytest.mark.parametrize("create_graph", [False, True])
def test_accumulated_gradients_wait_until_their_parameter_is_thawed(
    backend: str, size: int, create_graph: bool
) -> None:
    def program(comm: un.Communicator) -> list[float]:
        one, other = vectors(2)
        mine, found = comm.rank + 1.0, []
        averager = un.GradientAverager([one, other], comm, bucket_cap_mb=1e-5)
        with averager.no_sync():
            ((one + other).exp() * mine).sum().backward(create_graph=create_graph)
        # Two steps without it, and one that averages it although it does not reach it.
        one.requires_grad_(False)
        for _ in range(2):
            add([other], mine)
            found.append(value(one))
        one.requires_grad_(True)
        add([other], mine)
        found.append(value(one))
        averager.remove()
        return found

    averaged = pytest.approx(mean(size, lambda rank: rank + 1.0))
    found = pool(backend, 3).run(program, size=size)
    assert found == [[rank + 1.0, rank + 1.0, averaged] for rank in range(size)]


@EACH
@GRAPHS
def test_frozen_gradient_with_a_graph_is_not_averaged(backend: str, size: int) -> None:
    """It stays in p.grad, in the bucket of another whose gradient arrives before those of the last bucket."""

    def program(comm: un.Communicator) -> list[float]:
        last, one, frozen = (nn.Parameter(torch.zeros(numel)) for numel in (1000, 3, 3))
        mine = comm.rank + 1.0
        averager = un.GradientAverager(
            [last, one, frozen], comm, bucket_cap_mb=1e-3, first_bucket_mb=1e-3, find_unused_parameters=True
        )
        with averager.no_sync():
            ((one + frozen).exp() * mine).sum().backward(create_graph=True)
        frozen.requires_grad_(False)
        add([one, last], mine)
        averager.remove()
        return [value(one), value(frozen)]

    averaged = pytest.approx(mean(size, lambda rank: 2 * (rank + 1.0)))
    assert pool(backend, 3).run(program, size=size) == [[averaged, rank + 1.0] for rank in range(size)]


@EACH
@pytest.mark.parametrize("freeze", [False, True])
def test_two_networks_under_one_averager_train_in_turn(backend: str, size: int, freeze: bool) -> None:
    def train(networks: nn.ModuleList, rows: torch.Tensor) -> list[list[torch.Tensor]]:
        """All gradients after each step, which sets those of its own network to None at first."""
        found = []
        for step in range(3):
            trained, other = networks[step % 2], networks[1 - step % 2]
            trained.requires_grad_(True).zero_grad()
            other.requires_grad_(not freeze)
            trained(rows).square().sum().backward()
            found.append([p.grad.to_dense().clone() for p in networks.parameters() if p.grad is not None])
        return found

    def program(comm: un.Communicator) -> list[list[torch.Tensor]]:
        networks = networks_of_a_gan()
        averager = un.GradientAverager(networks, comm, average="sum", find_unused_parameters=True)
        found = train(networks, torch.tensor([comm.rank]))
        averager.remove()
        return found

    wanted = train(networks_of_a_gan(), torch.arange(size))
    for found in pool(backend, 3).run(program, size=size):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
        # The generator's are left bit for bit by the second step, the other's by the third.
        assert all(map(torch.equal, found[1][:3], found[0][:3]))
        assert all(map(torch.equal, found[2][3:], found[1][3:]))


def networks_of_a_gan() -> nn.ModuleList:
    """Two networks, each of three parameters, of which the first one has sparse gradients."""
    numbers = torch.Generator().manual_seed(0)
    networks = nn.ModuleList(nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1)) for _ in range(2))
    with torch.no_grad():
        for parameter in networks.double().parameters():
            parameter.normal_(generator=numbers)
    return networks


@EACH
def test_all_of_a_gradient_is_averaged_where_some_rank_reaches_it(backend: str, size: int) -> None:
    """The parameter is frozen on rank 0, and rank 1 alone reaches it."""

    def program(comm: un.Communicator) -> float:
        model = nn.ParameterList(vectors(2))
        averager = un.GradientAverager(list(model), comm, find_unused_parameters=True)
        one, other = model
        one.requires_grad_(comm.rank > 0)
        one.grad = torch.full_like(one, comm.rank + 1.0)
        add([one, other] if comm.rank == 1 else [other], 6.0)
        averager.remove()
        return value(one)

    wanted = pytest.approx(mean(size, lambda rank: rank + 1.0 + 6.0 * (rank == 1)))
    assert pool(backend, 3).run(program, size=size) == [wanted] * size


@EACH
def test_parameters_may_be_frozen_between_forward_and_backward(backend: str, size: int) -> None:
    def program(comm: un.Communicator) -> tuple[float, float]:
        one, other = vectors(2)
        averager = un.GradientAverager([one, other], comm)
        loss = ((one + other) * (comm.rank + 1)).sum()
        one.grad = torch.full_like(one, comm.rank + 5.0)
        one.requires_grad_(False)
        loss.backward()
        averager.remove()
        return value(one), value(other)

    averaged = pytest.approx(mean(size, lambda rank: rank + 1.0))
    assert pool(backend, 3).run(program, size=size) == [(rank + 5.0, averaged) for rank in range(size)]


@EACH
def test_several_averagers_of_the_parts_of_one_model(backend: str, size: int) -> None:
    """One has a sub-module, the other a list; a pass reaches both, only the first, and both again."""

    def program(comm: un.Communicator) -> list[tuple[float, float]]:
        model, (loose,), found = nn.Sequential(nn.Linear(1, 1, bias=False).double()), vectors(1), []
        averagers = [un.GradientAverager(model[0], comm), un.GradientAverager([loose], comm)]
        mine = torch.tensor([comm.rank + 1.0], dtype=torch.float64)
        for both in (True, False, True):
            out = model(mine).sum()
            (out + (loose * mine).sum() if both else out).backward()
            found.append((value(model[0].weight), value(loose)))
        for averager in averagers:
            averager.remove()
        return found

    once = mean(size, lambda rank: rank + 1.0)
    wanted = [pytest.approx(pair) for pair in [(once, once), (2 * once, once), (3 * once, 2 * once)]]
    assert pool(backend, 3).run(program, size=size) == [wanted] * size


# -- memory of the caller's ------------------------------------------------------------------------
def own_memory(layout: str, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory of these gradients; 7.0 is what is beside them."""
    if layout == "apart":
        return [torch.zeros_like(p, requires_grad=False) for p in parameters]
    gap, step = {"flat": (0, 1), "offset": (2, 1), "strided": (0, 2)}[layout]
    flat = torch.full((len(parameters) * (gap + 3 * step),), 7.0, dtype=torch.float64)
    return [part[gap::step].zero_() for part in flat.split(gap + 3 * step)]


def beside(layout: str, grads: Sequence[torch.Tensor]) -> bool:
    """Return whether the memory beside gradients is as it was."""
    if layout == "apart":
        return True
    flat = torch.empty(0, dtype=torch.float64).set_(grads[0].untyped_storage()).clone()
    for grad in grads:
        flat.as_strided(grad.shape, grad.stride(), grad.storage_offset()).fill_(7.0)
    return bool((flat == 7.0).all())


@short(
    "backend, size, layout",
    product(["thread", "shm", "gloo"], [2, 3], LAYOUTS),
    list(zip(["gloo", "thread"] * 2, [2, 3] * 2, LAYOUTS, strict=True)),
)
def test_memory_of_the_callers_is_filled(backend: str, size: int, layout: str) -> None:
    """In a plain pass, an accumulated and weighted one, and one that raises first; one parameter is never reached."""

    def program(comm: un.Communicator) -> list[list[float]]:
        parameters, found = vectors(3), []
        grads = own_memory(layout, parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        averager = un.GradientAverager(parameters, comm, bucket_cap_mb=1e-5)
        mine = comm.rank + 1.0

        def note() -> None:
            assert all(p.grad is grad for p, grad in zip(parameters, grads, strict=True))
            assert beside(layout, grads)
            found.append([value(p) for p in parameters])

        add(parameters[:2], mine)
        note()
        grads[0].zero_()
        averager.weight(mine)
        with averager.no_sync():
            add(parameters[:2], mine)
        note()
        handle = parameters[0].register_hook(fail)
        with pytest.raises(PlannedError):
            add(parameters[:2], mine)
        handle.remove()
        note()
        add(parameters[:1], mine)
        note()
        averager.remove()
        return found

    first = mean(size, lambda rank: rank + 1.0)
    weighted = mean(size, lambda rank: (rank + 1.0) ** 2) / first
    for rank, found in enumerate(pool(backend, 3).run(program, size=size)):
        second = [rank + 1.0, first + rank + 1.0, 0.0]
        wanted = [[first, first, 0.0], second, second, [2 * weighted, first + weighted, 0.0]]
        assert found == [pytest.approx(numbers) for numbers in wanted]


def fail(_: torch.Tensor) -> None:
    raise PlannedError


@EACH
def test_gradients_that_torch_has_made_are_filled(backend: str, size: int) -> None:
    """One that a pass in no_sync has made stays the same tensor; a sum, and a rank that does not reach it."""

    def program(comm: un.Communicator) -> float:
        model = nn.ParameterList(vectors(2))
        one, other = model
        averager = un.GradientAverager(list(model), comm, average="sum", find_unused_parameters=True)
        with averager.no_sync():
            add([one], comm.rank + 1.0)
        made = one.grad
        add([one, other] if comm.rank else [other], 1.0)
        assert one.grad is made
        averager.remove()
        return value(one)

    wanted = pytest.approx(mean(size, lambda rank: rank + 1.0 + (rank > 0), "sum"))
    assert pool(backend, 3).run(program, size=size) == [wanted] * size
