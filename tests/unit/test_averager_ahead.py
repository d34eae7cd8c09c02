"""Gradients of the slower rank are summed while it computes; whatever becomes of its pass, no mean is wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ahead_kit import eager, needed
from patience import until
from torch import nn

import unisono as un
from unisono.compression import resolve
from unisono.errors import AbortedError
from unisono.gradients.bucket import Bucket
from unisono.gradients.reducer import Reducer
from unisono.testing import pool

PAIR = partial(pool("shm", 3).run, size=2)


class OddError(Exception):
    """Of a hook."""


@pytest.mark.parametrize("why", ["compressed", "background"])
def test_nobody_is_told_of_buckets_that_travel_otherwise(why: str) -> None:
    def program(comm: un.Communicator) -> bool:
        with eager(comm) as part:
            part._engine.transport.background = why == "background"
            reducer = Reducer(part, resolve("bf16") if why == "compressed" else None)
            return reducer.ready(part.empty(400)) is None

    assert PAIR(program) == [True, True]


class Late:
    """Two parameters; the gradient of the second one comes first, and a hook on the first one's holds rank 1 up.

    Args:
        held: What rank 1 does then, for the first `times` passes.
    """

    def __init__(self, comm: un.Communicator, held: Callable[[Late], None], times: int = 1, **options: Any) -> None:
        self.first, self.second = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(40))
        self.held, self.rank = held, comm.rank
        self.averager = un.GradientAverager([self.first, self.second], comm, **options)
        self.bucket: Bucket = self.averager._schedule.buckets[0]
        self.first.register_hook(self.hold)
        self.left = times

    def hold(self, gradient: torch.Tensor) -> None:
        if self.left and self.rank == 1:
            self.left -= 1
            self.held(self)

    def summed(self, factor: float = 1.0) -> bool:
        """Whether rank 0, which gives 1 and the factor, has summed what this one gave, which is 2 times that."""
        return until(lambda: self.bucket.flat[39] == 1.5 * factor)

    def step(self, factor: float = 1.0) -> None:
        # Autograd comes to what was made last first.
        a = (self.first * (factor * (self.rank + 1.0))).sum()
        b = (self.second * (factor * (self.rank + 1.0))).sum()
        (a + b).backward()

    def gradients(self) -> list[list[float]]:
        return [p.grad.unique().tolist() for p in (self.first, self.second) if p.grad is not None]


@needed
def test_gradients_of_the_slower_rank_are_summed_while_it_computes() -> None:
    def program(comm: un.Communicator) -> tuple[list[bool], list[list[float]]]:
        with eager(comm) as part:
            seen: list[bool] = []
            found = []
            late = Late(part, lambda late: seen.append(late.summed(factors[len(seen)])), times=3)
            for factor in factors:
                late.first.grad = late.second.grad = None
                late.step(factor)
                found += late.gradients()
            return seen, found

    factors = [1.0, 10.0, 100.0]
    means = [[1.5 * factor] for factor in factors for _ in range(2)]
    assert PAIR(program) == [([], means), ([True] * 3, means)]


@needed
@pytest.mark.parametrize("times", [1, 2, 7, 8])
def test_a_pass_that_is_broken_off_when_others_have_summed_some_of_it_is_noticed_by_all(times: int) -> None:
    def breaks(late: Late) -> None:
        assert late.left < times - 1 or late.summed()
        raise OddError

    def program(comm: un.Communicator) -> tuple[str, list[list[float]]]:
        message = ""
        with eager(comm) as part:
            late = Late(part, breaks, times=times)
            for _ in range(times if part.rank else 0):
                with pytest.raises(OddError):
                    late.step()
            if part.rank == 0:
                with pytest.raises(AbortedError) as caught:
                    late.step()
                message = str(caught.value)
            assert late.gradients() == []
            # It was that step, and no other.
            late.step()
            return message, late.gradients()

    found = PAIR(program)
    assert "rank 1 aborted the communicator: its backward pass failed" in found[0][0]
    assert [means for _, means in found] == [[[1.5], [1.5]]] * 2


@needed
def test_a_pass_that_is_broken_off_before_that_does_no_harm() -> None:
    def breaks(late: Late) -> None:
        raise OddError

    def program(comm: un.Communicator) -> list[list[float]]:
        with eager(comm) as part:
            late = Late(part, breaks)
            if part.rank == 1:
                with pytest.raises(OddError):
                    late.step()
            comm.barrier()
            for _ in range(2):
                late.first.grad = late.second.grad = None
                late.step()
            return late.gradients()

    assert PAIR(program) == [[[1.5], [1.5]]] * 2


@needed
def test_more_of_a_gradient_that_others_have_summed_is_averaged_by_itself() -> None:
    def brings_more(late: Late) -> None:
        assert late.summed()
        with torch.enable_grad():
            (late.second * 10.0).sum().backward()

    def program(comm: un.Communicator) -> list[list[float]]:
        with eager(comm) as part:
            late = Late(part, brings_more)
            late.step()
            found = late.gradients()
            late.first.grad = late.second.grad = None
            late.step()
            return found + late.gradients()

    # 1 and 2, and 10 of rank 1 alone; then 1 and 2.
    assert PAIR(program) == [[[1.5], [6.5], [1.5], [1.5]]] * 2


class Sparse(torch.autograd.Function):
    """A sum whose gradient, ones, is sparse."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        ctx.shape = given.shape
        return given.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        return torch.ones(ctx.shape).to_sparse()


@needed
@pytest.mark.parametrize("how", ["sparse", "of a graph"])
def test_more_of_a_gradient_may_come_in_any_form(how: str) -> None:
    def brings_more(late: Late) -> None:
        assert late.summed()
        with torch.enable_grad():
            if how == "sparse":
                Sparse.apply(late.second).backward()
            else:
                (late.second.square() * 5.0).sum().backward(create_graph=True)

    def program(comm: un.Communicator) -> tuple[list[list[float]], bool]:
        with eager(comm) as part:
            late = Late(part, brings_more)
            late.step()
            assert late.second.grad is not None
            return late.gradients(), late.second.grad.requires_grad

    more = 1.0 if how == "sparse" else 10.0
    assert PAIR(program) == [([[1.5], [1.5 + more / 2]], rank == 1 and how == "of a graph") for rank in range(2)]


@needed
def test_a_weight_that_is_told_in_the_middle_of_a_pass_is_in_time() -> None:
    def weighs(late: Late) -> None:
        late.averager.weight(1.0 + 2 * late.rank)

    def program(comm: un.Communicator) -> tuple[list[bool], list[list[float]]]:
        with eager(comm) as part:
            late = Late(part, weighs)
            late.first.register_hook(lambda gradient: None if part.rank else weighs(late))
            opened: list[bool] = []
            fill = late.bucket.fill

            def filled(*given: Any) -> None:
                opened.append(late.bucket._telling.told[1][0] != 0)
                fill(*given)

            with patch.object(late.bucket, "fill", filled):
                late.step()
            return opened, late.gradients()

    assert PAIR(program) == [([False], [[1.75], [1.75]])] * 2


@needed
@pytest.mark.parametrize("how", ["weight", "join", "sum", "find_unused"])
def test_what_is_multiplied_later_is_not_summed_before(how: str) -> None:
    tags: list[int] = []

    def notes(late: Late) -> None:
        tags.append(late.bucket._telling.told[1][0])

    def program(comm: un.Communicator) -> tuple[list[bool], list[list[float]]]:
        with eager(comm) as part:
            late = Late(part, notes, average="sum" if how == "sum" else "mean", find_unused=how == "find_unused")
            if how == "weight":
                late.averager.weight(1.0 + 2 * part.rank)
            with late.averager.join() if how == "join" else nullcontext():
                late.step()
                found = late.gradients()
            return [tag != 0 for tag in tags], found

    mean = {"weight": 1.75, "sum": 3.0}.get(how, 1.5)
    assert PAIR(program) == [([], [[mean]] * 2), ([how == "find_unused"], [[mean]] * 2)]
