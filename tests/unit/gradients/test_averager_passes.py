"""Backward passes that are steps of training, and those that are not, or that ranks do not share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from averaged_models import TINY
from insides import transport_of
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.errors import AbortedError, MismatchError
from unisono.testing import pool, run_ranks


class OddError(Exception):
    """Exception of a hook."""


def layers() -> nn.Sequential:
    # Ranks that are threads share torch's own generator.
    numbers = torch.Generator().manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=numbers)
    return model


def sample(rank: int) -> torch.Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def mean(size: int) -> list[torch.Tensor]:
    model = layers()
    losses = [model(sample(rank)).square().mean() for rank in range(size)]
    return list(torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters())))


def close(model: nn.Module, size: int) -> bool:
    return all(torch.allclose(p.grad, g) for p, g in zip(model.parameters(), mean(size), strict=True))


def broken_off(comm: un.Communicator, model: nn.Sequential) -> None:
    """Rank 1 breaks a pass off before the first layer; two buckets are full by then: those of all are of one length."""

    def fails(gradient: torch.Tensor) -> None:
        raise OddError

    if comm.rank == 1:
        handle = model[0].weight.register_hook(fails)
        with pytest.raises(OddError):
            model(sample(comm.rank)).sum().backward()
        handle.remove()


def test_pass_aborted_on_one_rank_fails_on_all() -> None:
    def program(comm: un.Communicator) -> tuple[str, bool]:
        model, message = layers(), ""
        averager = un.GradientAverager(model, comm, bucket_cap_mb=128 / 2**20)
        broken_off(comm, model)
        if comm.rank == 0:
            with pytest.raises(AbortedError) as caught:
                model(sample(comm.rank)).sum().backward()
            message = str(caught.value)
        assert all(p.grad is None for p in model.parameters())
        model(sample(comm.rank)).square().mean().backward()
        averager.remove()
        return message, close(model, comm.size)

    found = pool("gloo", 2).run(program)
    assert "rank 1 aborted the communicator: its backward pass failed" in found[0][0]
    assert [right for _, right in found] == [True, True]


@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_aborted_pass_without_overlap_has_no_effect(backend: str) -> None:
    def program(comm: un.Communicator) -> bool:
        with comm.dup() as part:
            if backend == "shm":
                transport_of(part).background = False
            model = layers()
            averager = un.GradientAverager(model, part, bucket_cap_mb=128 / 2**20)
            broken_off(part, model)
            model.zero_grad()
            model(sample(comm.rank)).square().mean().backward()
            averager.remove()
        return close(model, comm.size)

    assert all(pool(backend, 2).run(program))


@pytest.mark.parametrize("backend", ["thread", "gloo"])
def test_pass_aborted_equally_on_all_ranks_has_no_effect(backend: str) -> None:
    def program(comm: un.Communicator) -> bool:
        model = layers()
        averager = un.GradientAverager(model, comm, bucket_cap_mb=128 / 2**20)
        tries = itertools.count()

        def fails(gradient: torch.Tensor) -> None:
            if next(tries) < 9:
                raise OddError

        model[0].weight.register_hook(fails)
        for _ in range(9):
            with pytest.raises(OddError):
                model(sample(comm.rank)).sum().backward()
            model.zero_grad()
        model(sample(comm.rank)).square().mean().backward()
        averager.remove()
        return close(model, comm.size)

    assert all(pool(backend, 2).run(program))


def test_autograd_grad_on_one_rank_is_no_step() -> None:
    def program(comm: un.Communicator) -> bool:
        model = layers()
        averager = un.GradientAverager(model, comm, find_unused_parameters=True, **TINY)
        if comm.rank == 0:
            given = sample(7).requires_grad_()
            torch.autograd.grad(model(given).sum(), given)
            torch.autograd.grad(model(given).sum(), list(model.parameters()))
            torch.func.grad(lambda x: model(x).sum())(sample(7))
        model(sample(comm.rank)).square().mean().backward()
        averager.remove()
        return close(model, comm.size)

    assert all(pool("thread", 2).run(program))


def test_weight_survives_a_gradient_penalty() -> None:
    def penalized(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        given = given.requires_grad_()
        found = model(given).square().sum(1)
        (slope,) = torch.autograd.grad(found.sum(), given, create_graph=True)
        return found + slope.square().sum(1)

    def program(comm: un.Communicator) -> bool:
        model, lengths = layers(), [2, 5]
        averager = un.GradientAverager(model, comm, find_unused_parameters=True)
        averager.weight(lengths[comm.rank])
        penalized(model, sample(comm.rank)[: lengths[comm.rank]]).mean().backward()
        averager.remove()
        alone = layers()
        penalized(alone, torch.cat([sample(rank)[:n] for rank, n in enumerate(lengths)])).mean().backward()
        return all(torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))

    assert all(pool("thread", 2).run(program))


def test_pass_in_a_hook_loses_no_gradients() -> None:
    def program(comm: un.Communicator) -> bool:
        model = layers()
        averager = un.GradientAverager(model, comm)
        hidden = model[1](model[0](sample(comm.rank)))

        def runs_another(gradient: torch.Tensor) -> None:
            # The last layer's gradient has come by now.
            with torch.enable_grad():
                model[2](torch.zeros(1, 4, dtype=torch.float64)).sum().backward()

        hidden.register_hook(runs_another)
        model[2](hidden).square().mean().backward()
        averager.remove()
        return close(model, comm.size)

    assert all(pool("thread", 2).run(program))


@pytest.mark.parametrize("backend", ["thread", "gloo"])
def test_outputs_made_before_remove_are_not_averaged(backend: str) -> None:
    def program(comm: un.Communicator) -> bool:
        model = layers()
        averager = un.GradientAverager(model, comm, find_unused_parameters=True)
        loss = model(sample(comm.rank)).square().mean()
        averager.remove()
        loss.backward()
        (alone,) = torch.autograd.grad(model(sample(comm.rank)).square().mean(), [model[0].weight])
        return torch.equal(model[0].weight.grad, alone)

    assert all(pool(backend, 2).run(program))


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_ranks_may_use_checkpointed_layers_unequally_often(backend: str) -> None:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        hidden = model[0](sample(rank))
        for _ in range(1 + 2 * (rank % 2)):
            hidden = checkpoint(model[1], torch.tanh(hidden), use_reentrant=True)
        return model[2](hidden).square().mean()

    def program(comm: un.Communicator) -> bool:
        model, alone = layers(), layers()
        averager = un.GradientAverager(model, comm, bucket_cap_mb=128 / 2**20)
        for _ in range(2):
            model.zero_grad()
            loss(model, comm.rank).backward()
        averager.remove()
        (sum(loss(alone, rank) for rank in range(comm.size)) / comm.size).backward()
        return all(torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))

    assert all(pool(backend, 3).run(program))


def test_models_with_different_buffers_are_rejected() -> None:
    def program(comm: un.Communicator) -> str:
        model = layers()
        for name in "ab" if comm.rank == 0 else "ba":
            model.register_buffer(name, torch.zeros(2))
        with pytest.raises(MismatchError) as caught:
            un.GradientAverager(model, comm)
        return str(caught.value)

    for message in pool("thread", 2).run(program):
        assert "'a'" in message


@dataclass
class Output:
    value: torch.Tensor
    kind: str = "odd"


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [(t, 1)], lambda t: {"value": t}, Output])
def test_rank_with_a_constant_loss_takes_part(wrap: Callable[[torch.Tensor], object]) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers()

        def forward(self, x: torch.Tensor, skips: bool) -> object:
            return wrap(x * 2 if skips else self.inner(x))

    def program(comm: un.Communicator) -> bool:
        model, tensors = Wrapped(), []
        averager = un.GradientAverager(model, comm, find_unused_parameters=True)
        found = model(sample(0).requires_grad_(), comm.rank == 1)
        tree_map_only(torch.Tensor, tensors.append, vars(found) if isinstance(found, Output) else found)
        tensors[0].square().mean().backward()
        averager.remove()
        alone = layers()
        (alone(sample(0)).square().mean() / 2).backward()
        return all(torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))

    assert run_ranks(program, 2, timeout=60.0) == [True, True]


@pytest.mark.soak
def test_unsupported_compiled_autograd_is_rejected() -> None:
    def program(comm: un.Communicator) -> str:
        model = layers()
        averager = un.GradientAverager(model, comm)
        with (
            torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(RuntimeError) as caught,
        ):
            model(sample(comm.rank)).sum().backward()
        averager.remove()
        return str(caught.value)

    for message in pool("shm", 2).run(program):
        assert "compiled autograd calls no hook at the end of a backward pass" in message
