"""Hooks that average, in loops whose steps differ from rank to rank, fail, or come to an end."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from averaged_models import TINY, Branches, Net, batches, gradients, made, same, wanted_of
from averager_helpers import RANKS
from pairwise import short
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.testing import pool


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_find_unused_parameters_allows_skipping(backend: str) -> None:
    given = batches(3, 1)

    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Branches)
        averager = un.GradientAverager(model, comm, find_unused_parameters=True, **TINY)
        model(given[comm.rank][0], comm.rank == 0).square().sum().backward()
        averager.remove()
        return gradients(model)

    model = made(Branches)
    (sum(model(given[r][0], r == 0).square().sum() for r in range(3)) / 3).backward()
    for found in pool(backend, 3).run(program):
        assert same(found, gradients(model))


def test_parameter_unused_on_all_ranks_has_no_gradient() -> None:
    def program(comm: un.Communicator) -> list[bool]:
        model = made(Branches)
        un.GradientAverager(model, comm, find_unused_parameters=True)
        model(batches(1, 1)[0][0], True).sum().backward()
        return [p.grad is None for p in model.parameters()]

    assert un.launch(program, 2, "thread") == [[False] * 4 + [True] * 2] * 2


@pytest.mark.parametrize("backend", ["thread", "gloo"])
def test_weights_give_the_mean_over_samples(backend: str) -> None:
    lengths = [1, 5, 2]
    given = [batches(1, 1, samples=n, seed=n)[0][0] for n in lengths]

    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Net)
        averager = un.GradientAverager(model, comm, **TINY)
        for _ in range(2):
            model.zero_grad()
            averager.weight(lengths[comm.rank])
            model(given[comm.rank]).square().mean().backward()
        averager.remove()
        return gradients(model)

    wanted = wanted_of(Net, given)
    for found in pool(backend, 3).run(program):
        assert same(found, wanted)


@pytest.mark.parametrize("called", [0, 1, 2])
@pytest.mark.parametrize(("backend", "size"), RANKS)
def test_one_weight_gives_the_mean_over_accumulated_samples(backend: str, size: int, called: int) -> None:
    """It may be given before the first micro-batch of a step, or between two."""
    given = [batches(1, 3, samples=rank + 1, seed=rank)[0] for rank in range(size)]

    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model, mine = made(Net), given[comm.rank]
        averager = un.GradientAverager(model, comm, **TINY)
        n_samples = sum(map(len, mine))
        for number, batch in enumerate(mine):
            if number == called:
                averager.weight(n_samples)
            with averager.no_sync() if number < 2 else nullcontext():
                (model(batch).square().mean(1).sum() / n_samples).backward()
        averager.remove()
        return gradients(model)

    wanted = wanted_of(Net, [batch for mine in given for batch in mine])
    for found in pool(backend, 3).run(program, size=size):
        assert same(found, wanted)


@pytest.mark.parametrize(("backend", "size"), RANKS)
def test_second_weight_of_a_step_is_an_error(backend: str, size: int) -> None:
    """The step may be ended by setting gradients to None, or with the first weight."""

    def program(comm: un.Communicator) -> list[float]:
        weight = torch.zeros(1, requires_grad=True)
        averager = un.GradientAverager([weight], comm)
        found = []
        for dropped in (True, False, False):
            averager.weight(comm.rank + 1)
            with averager.no_sync():
                (weight * comm.rank).sum().backward()
            with pytest.raises(RuntimeError, match="once a step"):
                averager.weight(1)
            if dropped:
                weight.grad = None
                averager.weight(2 - comm.rank % 2)
            (weight * comm.rank).sum().backward()
            assert weight.grad is not None
            found.append(weight.grad.item())
            weight.grad = None
        averager.remove()
        return found

    ranks = range(size)
    dropped = sum((2 - rank % 2) * rank for rank in ranks) / sum(2 - rank % 2 for rank in ranks)
    kept = sum((rank + 1) * 2 * rank for rank in ranks) / sum(rank + 1 for rank in ranks)
    wanted = [pytest.approx(dropped), pytest.approx(kept), pytest.approx(kept)]
    assert pool(backend, 3).run(program, size=size) == [wanted] * size


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weight_is_a_number_of_samples(weight: float) -> None:
    averager = un.GradientAverager([torch.zeros(1, requires_grad=True)], un.init("thread"))
    with pytest.raises(ValueError, match="at least 0"):
        averager.weight(weight)


@short(
    "backend, steps",
    [("thread", (4, 2, 3)), ("shm", (4, 2, 3)), ("gloo", (4, 2, 3)), ("gloo", (0, 1, 2)), ("gloo", (2, 0, 1))],
    [("thread", (4, 2, 3)), ("gloo", (0, 1, 2)), ("gloo", (2, 0, 1))],
)
def test_join_allows_fewer_batches(backend: str, steps: tuple[int, ...]) -> None:
    given = batches(3, 4)

    def train(model: nn.Module, mine: list[torch.Tensor]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in mine:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    def program(comm: un.Communicator) -> list[torch.Tensor]:
        model = made(Net)
        averager = un.GradientAverager(model, comm, **TINY)
        with averager.join():
            train(model, given[comm.rank][: steps[comm.rank]])
        averager.remove()
        return [p.detach().clone() for p in model.parameters()]

    model = made(Net)
    train(model, [torch.cat([given[r][i] for r in range(3) if i < steps[r]]) for i in range(max(steps))])
    for found in pool(backend, 3).run(program):
        for parameter, wanted in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted.detach(), rtol=0, atol=1e-10)


def test_averager_may_be_replaced_inside_join() -> None:
    def program(comm: un.Communicator) -> list[float]:
        weight = torch.ones(1, requires_grad=True)
        averager = un.GradientAverager([weight], comm)
        found = []
        with averager.join():
            for step in range(2 + comm.rank):
                if step == 1:
                    averager.move_to(comm.dup())
                weight.grad = None
                (weight * comm.rank).sum().backward()
                assert weight.grad is not None
                found.append(weight.grad.item())
        return found

    assert un.launch(program, 2, "thread") == [[0.5, 0.5], [0.5, 0.5, 1.0]]


def test_error_in_backward_does_not_affect_the_next_step() -> None:
    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Net)
        un.GradientAverager(model, comm, **TINY)
        batch = batches(2, 1)[comm.rank][0]
        with pytest.raises(RuntimeError, match="on purpose"):
            model.get_submodule("c")(Fails.apply(model.get_submodule("a")(batch))).sum().backward()
        model.zero_grad()
        model(batch).square().mean().backward()
        return gradients(model)

    wanted = wanted_of(Net, [rank[0] for rank in batches(2, 1)])
    for found in un.launch(program, 2, "thread"):
        assert same(found, wanted)


def test_settings_after_a_failed_backward_apply() -> None:
    def program(comm: un.Communicator) -> tuple[float, float]:
        one, two = (torch.ones(1, requires_grad=True) for _ in range(2))
        averager = un.GradientAverager([one, two], comm, find_unused_parameters=True)
        found = []
        for accumulates in (False, True):
            with pytest.raises(RuntimeError, match="on purpose"):
                (Fails.apply(one * 2) * two).sum().backward()
            one.grad = two.grad = None
            if accumulates:
                with averager.no_sync():
                    two.sum().backward()
                one.sum().backward()
            else:
                averager.weight([1, 3][comm.rank])
                (two * comm.rank).sum().backward()
            assert two.grad is not None
            found.append(two.grad.item())
        return found[0], found[1]

    assert un.launch(program, 2, "thread") == [(0.75, 1.0)] * 2


def test_accumulated_gradients_may_be_dropped() -> None:
    def program(comm: un.Communicator) -> tuple[bool, bool]:
        long, short = (torch.ones(length, requires_grad=True) for length in (1 << 16, 2))
        averager = un.GradientAverager([long, short], comm)
        with averager.no_sync():
            (long.sum() + short.sum()).backward()
        long.grad = short.grad = None
        short.sum().backward()
        return long.grad is None, short.grad is None

    assert un.launch(program, 2, "thread") == [(True, False)] * 2


@pytest.mark.parametrize("sparse", [True, False])
def test_zero_weight_gradient_may_be_nan(sparse: bool) -> None:
    def program(comm: un.Communicator) -> float:
        model = made(lambda: nn.Embedding(2, 1, sparse=sparse))
        averager = un.GradientAverager(model, comm)
        averager.weight(comm.rank)
        (model(torch.tensor([1])) * (2.0 if comm.rank else float("nan"))).sum().backward()
        found = gradients(model)[0]
        assert found is not None
        return found[1].item()

    assert un.launch(program, 2, "thread") == [2.0, 2.0]


def test_hooks_keep_the_averager_until_remove() -> None:
    def program(comm: un.Communicator) -> tuple[bool, bool, float]:
        weight = torch.zeros(1, requires_grad=True)
        kept = weakref.ref(un.GradientAverager([weight], comm))
        gc.collect()
        averager = kept()
        alive = averager is not None
        assert averager is not None
        averager.remove()
        averager.remove()
        del averager
        gc.collect()
        (weight * comm.rank).sum().backward()
        assert weight.grad is not None
        return alive, kept() is None, weight.grad.item()

    # Ranks in processes of their own: the collector of a process works for one thread at a time.
    assert pool("shm", 3).run(program, size=2) == [(True, True, 0.0), (True, True, 1.0)]


def test_remove_frees_after_a_failed_nested_pass() -> None:
    def program(comm: un.Communicator) -> bool:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        kept = weakref.ref(un.GradientAverager([*first.parameters(), *second.parameters()], comm))
        entered = torch.ones(1, 2, requires_grad=True)
        # What follows the inner pass in the outer one is never reached, and its graph lives as long as the loss.
        loss = checkpoint(second, Fails.apply(first(entered)), use_reentrant=True).sum()
        with pytest.raises(RuntimeError, match="on purpose"):
            loss.backward()
        averager = kept()
        assert averager is not None
        averager.remove()
        del averager
        gc.collect()
        return kept() is None

    assert pool("shm", 3).run(program, size=2) == [True, True]


def test_copies_of_a_model_are_not_averaged() -> None:
    def program(comm: un.Communicator) -> float:
        model = nn.Linear(1, 1, bias=False)
        averager = un.GradientAverager(model, comm, find_unused_parameters=True)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for _ in range(comm.rank):
                other(torch.ones(1)).sum().backward()
                assert other.weight.grad.item() == 1
        assert model.weight.grad is None
        model(torch.ones(1) * comm.rank).sum().backward()
        assert averager.state_dict()["steps"] == 1
        return model.weight.grad.item()

    assert un.launch(program, 2, "thread") == [0.5, 0.5]
