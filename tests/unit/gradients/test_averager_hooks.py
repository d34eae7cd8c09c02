"""Hooks of parameters: when gradients are copied, and what users' hooks see."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from averaged_models import batches, gradients, made, same, wanted_of
from averager_helpers import RANKS
from torch import nn

import unisono as un
from unisono.errors import AbortedError
from unisono.gradients import bucket
from unisono.gradients.bucket import BucketContents
from unisono.testing import pool

LAYERS = 4


class Straight(nn.Module):
    """Gradients come in the reverse order of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(LAYERS)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.ordered():
            batch = torch.tanh(layer(batch))
        return batch

    def ordered(self) -> Iterable[nn.Module]:
        return self.layers


class Turned(Straight):
    """The last layer comes first, so gradients come in another order than is expected of a model."""

    def ordered(self) -> Iterable[nn.Module]:
        return reversed(self.layers)


@pytest.mark.parametrize("model", [Turned, Straight])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_gradients_are_copied_in_chunks_in_any_order(backend: str, model: type[nn.Module]) -> None:
    given = batches(2, 4)

    def program(comm: un.Communicator) -> tuple[list[list[int]], list[list[torch.Tensor | None]]]:
        take, copied, found = BucketContents.take, [], []

        def noting(self: BucketContents, slots: Iterable[int]) -> None:
            before = sum(self.inside)
            take(self, slots)
            copied[-1].append(sum(self.inside) - before)

        # Two layers each.
        with patch.object(bucket, "_CHUNK_BYTES", 2 * 6 * 6 * 8), patch.object(BucketContents, "take", noting):
            averaged = made(model)
            averager = un.GradientAverager(averaged, comm)
            for step, batch in enumerate(given[comm.rank]):
                copied.append([])
                # The third step's gradients are averaged with the fourth's.
                if step != 3:
                    averaged.zero_grad()
                with averager.no_sync() if step == 2 else nullcontext():
                    averaged(batch).square().mean().backward()
                found.append(gradients(averaged))
            averager.remove()
        return copied, found

    # Gradients of the first model come in the order of parameters, which only other backends learn in the first pass.
    late, early = [1, 3], [2, 2]
    first = late if model is Turned else early
    later = early if backend == "gloo" else first
    wanted = [wanted_of(model, [given[rank][step] for rank in range(2)]) for step in range(4)]
    for copied, found in pool(backend, 3).run(program, size=2):
        assert copied == [first, later, [], later]
        assert same(found[0], wanted[0])
        assert same(found[1], wanted[1])
        assert same(found[3], [a + b for a, b in zip(wanted[2], wanted[3], strict=True)])


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_remove_inside_a_pass_is_rejected(backend: str) -> None:
    def program(comm: un.Communicator) -> list[list[float]]:
        model = made(Turned)
        averager = un.GradientAverager(model, comm)
        handle = next(model.parameters()).register_post_accumulate_grad_hook(lambda _: averager.remove())
        sample = torch.full((2, 6), comm.rank + 1.0, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"remove\(\) was called inside a backward pass"):
            model(sample).sum().backward()
        undone = [p.grad is None for p in model.parameters()]
        handle.remove()
        model(sample).sum().backward()
        averager.remove()
        return [[float(all(undone))], *(g.flatten().tolist() for g in gradients(model))]

    found = pool(backend, 3).run(program, size=2)
    assert found[0] == found[1]
    assert found[0][0] == [1.0]


@pytest.mark.parametrize("count", [10, 20_000, 80_000])
def test_pass_inside_a_hook_may_repeat_gradients_of_the_outer_one(count: int) -> None:
    def program(comm: un.Communicator) -> list[float]:
        parameter, head = nn.Parameter(torch.ones(count)), nn.Parameter(torch.ones(1))

        def again(_: torch.Tensor) -> None:
            handle.remove()
            with torch.enable_grad():
                (parameter * float(comm.rank + 1)).sum().backward()

        handle = parameter.register_post_accumulate_grad_hook(again)
        averager = un.GradientAverager([parameter, head], comm)
        ((parameter * 2.0).sum() * head).sum().backward()
        averager.remove()
        assert parameter.grad is not None
        return parameter.grad.unique().tolist()

    # The outer pass gives 2 to all ranks, and the inner ones 1 and 2.
    assert pool("shm", 3).run(program, size=2) == [[3.5]] * 2


def test_grad_setter_hook_may_read_the_parameter() -> None:
    def program(comm: un.Communicator) -> tuple[list[bool], list[float]]:
        parameter = nn.Parameter(torch.ones(200, 200))
        seen: list[bool] = []

        def told(_: torch.Tensor) -> None:
            parameter.grad = parameter.grad.clone()
            weakref.finalize(parameter.grad, lambda: seen.append(parameter.grad is None))

        parameter.register_post_accumulate_grad_hook(told)
        averager = un.GradientAverager([parameter], comm)
        (parameter * float(comm.rank)).sum().backward()
        averager.remove()
        return seen, parameter.grad.unique().tolist()

    assert pool("shm", 3).run(program, size=2) == [([True], [0.5])] * 2


def take(parameter: torch.Tensor) -> None:
    parameter.grad = None


def step(parameter: torch.Tensor) -> None:
    """Make the step of an optimizer, and set the gradient to zero."""
    with torch.no_grad():
        parameter -= parameter.grad
        parameter.grad.zero_()


def step_and_take(parameter: torch.Tensor) -> None:
    step(parameter)
    take(parameter)


USES = {"take": take, "step": step, "step and take": step_and_take}
"""Uses of a gradient by a hook, before it is averaged."""


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("backend", "size"), RANKS)
def test_gradient_that_a_hook_has_used_is_an_error_on_all_ranks(backend: str, size: int, everywhere: bool) -> None:
    """The pass is dropped, and the next one is right. Hooks are registered before and after the averager is made."""

    def program(comm: un.Communicator) -> list[tuple[str, str, float]]:
        parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        used, found = [""], []

        def use(where: str, parameter: torch.Tensor) -> None:
            place, _, how = used[0].partition(" ")
            if place == where and (everywhere or comm.rank == 1):
                USES[how](parameter)

        parameters[0].register_post_accumulate_grad_hook(partial(use, "before"))
        averager = un.GradientAverager(parameters, comm, bucket_cap_mb=1e-5)
        parameters[0].register_post_accumulate_grad_hook(partial(use, "after"))
        for place in ("before", "after"):
            for how in USES:
                used[0] = f"{place} {how}"
                for parameter in parameters:
                    parameter.grad = torch.full((3,), comm.rank + 1.0)
                with pytest.raises(RuntimeError) as caught:
                    ((parameters[0] + parameters[1]) * 6.0).sum().backward()
                assert all(torch.equal(p.grad, torch.full((3,), comm.rank + 1.0)) for p in parameters), used
                used[0] = ""
                ((parameters[0] + parameters[1]) * 6.0).sum().backward()
                assert torch.equal(parameters[0].grad, parameters[1].grad)
                found.append((caught.type.__name__, str(caught.value), parameters[0].grad.mean().item()))
        averager.remove()
        return found

    for rank, found in enumerate(pool(backend, 3).run(program, size=size)):
        assert len(found) == 2 * len(USES)
        for kind, text, averaged in found:
            assert kind == (RuntimeError if everywhere or rank == 1 else AbortedError).__name__
            assert "'parameter 0'" in text
            assert averaged == (size + 1) / 2 + 6.0


@pytest.mark.parametrize(("backend", "size"), RANKS)
def test_gradient_that_was_taken_and_added_to_again_is_an_error(backend: str, size: int) -> None:
    """A pass inside a hook adds to it after a hook of the parameter has taken what came before."""

    def program(comm: un.Communicator) -> str:
        one, other = (nn.Parameter(torch.ones(3)) for _ in range(2))

        def take_once(_: torch.Tensor) -> None:
            handle.remove()
            one.grad = None

        def again(_: torch.Tensor) -> None:
            with torch.enable_grad():
                (one * 2.0).sum().backward()

        averager = un.GradientAverager([one, other], comm)
        handle = one.register_post_accumulate_grad_hook(take_once)
        other.register_post_accumulate_grad_hook(again)
        if comm.rank:
            handle.remove()
        # The gradient of the first one comes first.
        with pytest.raises(RuntimeError) as caught:
            ((other * 3.0) * one).sum().backward()
        averager.remove()
        return str(caught.value)

    for text in pool(backend, 3).run(program, size=size):
        assert "'parameter 0'" in text


@pytest.mark.parametrize(("backend", "size"), RANKS)
def test_later_hooks_see_the_same_as_without_the_averager(backend: str, size: int) -> None:
    def program(comm: un.Communicator | None, rank: int) -> list[float]:
        parameters = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
        averager = None if comm is None else un.GradientAverager(parameters, comm, bucket_cap_mb=1e-5)
        seen: list[float] = []
        for parameter in parameters:
            parameter.grad = torch.full((3,), rank + 1.0)
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mean().item()))
        sum((p * (number + rank)).sum() for number, p in enumerate(parameters)).backward()
        if averager is not None:
            averager.remove()
        return seen

    found = pool(backend, 3).run(lambda comm: program(comm, comm.rank), size=size)
    assert found == [program(None, rank) for rank in range(size)]
