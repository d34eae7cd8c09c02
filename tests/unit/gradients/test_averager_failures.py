"""Backward passes that raise: gradients and weights are as before, and the next pass is right on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from averaged_models import gradients, same
from averager_helpers import BACKENDS, SMALL, Found, OddError, combined, quickly, sample, stack, weight
from pairwise import short

import unisono as un
from unisono.testing import pool, run_ranks

WHOLE: dict[str, Any] = {"bucket_cap_mb": 25.0, "first_bucket_mb": 25.0}
"""One bucket, which is reduced at the end of the pass with every backend."""
WHERE = ["last", "middle", "first", "function", "post hook before", "post hook after"]
LATE = ["first", "function", "post hook before"]
"""Places reached when two buckets of SMALL are full, and have left over gloo."""
KEPT = ["nothing", "left", "accumulated"]
WEIGHTS = [3.0, 1.0]
_LAYERS = {"last": 2, "middle": 1, "first": 0}


class Through(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call()
        return gradients[0], None


class Trap:
    """A model and its averager, and a place where the backward pass raises while `armed`.

    Args:
        comm: The ranks that average.
        where: One of WHERE.
        width: Of the first layer.
        growth: How many times as wide each layer is as the one before.
        options: Of the averager.
    """

    def __init__(self, comm: un.Communicator, where: str, width: int = 4, growth: int = 1, **options: Any) -> None:
        self.model, self.rank, self.width, self.armed = stack(width, growth=growth), comm.rank, width, False
        layer = weight(self.model, 0 if options.get("bucket_cap_mb") == SMALL["bucket_cap_mb"] else 1)
        if where == "post hook before":
            layer.register_post_accumulate_grad_hook(self.trip)
        self.averager = un.GradientAverager(self.model, comm, **options)
        if where == "post hook after":
            layer.register_post_accumulate_grad_hook(self.trip)
        if where in _LAYERS:
            weight(self.model, _LAYERS[where]).register_hook(self.trip)
        self.inside = where == "function"

    def trip(self, *_: object) -> None:
        if self.armed:
            raise OddError

    def step(self, *, short: bool = False) -> None:
        """A forward and a backward pass; without the last layer if `short`."""
        hidden = self.model[0](sample(self.rank, self.width))
        if self.inside:
            hidden = Through.apply(hidden, self.trip)  # type: ignore[no-untyped-call]  # of torch
        hidden = self.model[1](hidden)
        (hidden if short else self.model[2](hidden)).square().mean().backward()

    def prepare(self, kept: str) -> Found:
        """Bring the gradients into one of the states of KEPT; what they are."""
        if kept != "nothing":
            with self.averager.no_sync() if kept == "accumulated" else nullcontext():
                self.step()
        return gradients(self.model)

    def fail(self, *expected: type[Exception], short: bool = False) -> str:
        """A pass that raises; the name of the error."""
        self.armed = True
        with pytest.raises(expected or (OddError,)) as caught:
            self.step(short=short)
        self.armed = False
        return caught.type.__name__


def unchanged(found: Found, wanted: Found) -> bool:
    """Return whether gradients are equal to the last bit."""
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def alone(rank: int, width: int = 4, growth: int = 1, *, short: bool = False) -> Found:
    """The gradients of one rank's pass in a single process."""
    model = stack(width, 3 - short, growth=growth)
    model(sample(rank, width)).square().mean().backward()
    return gradients(model) + [None] * short


def added(kept: Found, more: Found, times: int = 1) -> Found:
    """The sums that torch alone computes when more is added to gradients."""
    return [a if b is None else times * b if a is None else a + times * b for a, b in zip(kept, more, strict=True)]


@short(
    "backend, where, width, kept",
    product(BACKENDS, WHERE, [4, 150], KEPT),
    list(zip(BACKENDS * 2, WHERE, [4, 150] * 3, sorted(KEPT * 2), strict=True)),
)
def test_failed_pass_restores_gradients(backend: str, where: str, width: int, kept: str) -> None:
    def program(comm: un.Communicator) -> tuple[bool, Found, Found, Any]:
        trap = Trap(comm, where, width, **WHOLE)
        before = trap.prepare(kept)
        trap.fail()
        restored = unchanged(gradients(trap.model), before)
        trap.step()
        steps = trap.averager.state_dict()["steps"]
        trap.averager.remove()
        return restored, before, gradients(trap.model), steps

    results = pool(backend, 2).run(program)
    means = combined([added(result[1], alone(rank, width)) for rank, result in enumerate(results)])
    for restored, _, found, steps in results:
        assert restored
        assert same(found, means)
        assert steps == (2 if kept == "left" else 1)


@short(
    "backend, where, kept",
    product(BACKENDS, WHERE, KEPT),
    list(zip(BACKENDS * 2, reversed(WHERE), sorted(KEPT * 2), strict=True)),
)
def test_failed_pass_in_no_sync_restores_gradients(backend: str, where: str, kept: str) -> None:
    def program(comm: un.Communicator) -> tuple[bool, Found, Found]:
        trap = Trap(comm, where, **WHOLE)
        before = trap.prepare(kept)
        with trap.averager.no_sync():
            trap.fail()
            restored = unchanged(gradients(trap.model), before)
            trap.step()
        trap.step()
        trap.averager.remove()
        return restored, before, gradients(trap.model)

    results = pool(backend, 2).run(program)
    means = combined([added(result[1], alone(rank), 2) for rank, result in enumerate(results)])
    for restored, _, found in results:
        assert restored
        assert same(found, means)


@short("backend, where", product(BACKENDS, WHERE), list(zip(BACKENDS * 2, WHERE, strict=True)))
def test_weight_survives_a_failed_pass(backend: str, where: str) -> None:
    def program(comm: un.Communicator) -> Found:
        trap = Trap(comm, where, **WHOLE)
        trap.averager.weight(WEIGHTS[comm.rank])
        trap.fail()
        trap.step()
        trap.averager.remove()
        return gradients(trap.model)

    means = combined([alone(rank) for rank in range(2)], WEIGHTS)
    for found in pool(backend, 2).run(program):
        assert same(found, means)


@short(
    "backend, where, width, weighted",
    product(BACKENDS, WHERE, [4, 150], [False, True]),
    list(zip(BACKENDS * 2, WHERE, [4, 150] * 3, [False, False, True] * 2, strict=True)),
)
def test_rank_failing_before_any_bucket_retries_alone(backend: str, where: str, width: int, weighted: bool) -> None:
    def program(comm: un.Communicator) -> Found:
        trap = Trap(comm, where, width, **WHOLE)
        if weighted:
            trap.averager.weight(WEIGHTS[comm.rank])
        if comm.rank == 1:
            trap.fail()
            trap.fail()
        trap.step()
        trap.averager.remove()
        return gradients(trap.model)

    means = combined([alone(rank, width) for rank in range(2)], WEIGHTS if weighted else None)
    for found in pool(backend, 2).run(program):
        assert same(found, means)


@short("where, kept", product(LATE, KEPT), list(zip(LATE, KEPT, strict=True)))
def test_pass_failing_on_all_ranks_after_a_bucket_is_dropped(where: str, kept: str) -> None:
    def program(comm: un.Communicator) -> tuple[bool, Found, Found]:
        trap = Trap(comm, where, **SMALL)
        before = trap.prepare(kept)
        # The failure of the other rank may come first.
        trap.fail(OddError, un.CommError)
        restored = unchanged(gradients(trap.model), before)
        trap.step()
        trap.averager.remove()
        return restored, before, gradients(trap.model)

    results = pool("gloo", 2).run(program)
    means = combined([added(result[1], alone(rank)) for rank, result in enumerate(results)])
    for restored, _, found in results:
        assert restored
        assert same(found, means)


@short(
    "where, kept, waits", product(LATE, KEPT, [False, True]), list(zip(LATE, KEPT, [False, True, False], strict=True))
)
def test_rank_failing_after_a_bucket_ends_the_pass_on_all(where: str, kept: str, waits: bool) -> None:
    def program(comm: un.Communicator) -> tuple[str, bool, Found, Found]:
        trap = Trap(comm, where, **SMALL)
        before = trap.prepare(kept)
        if comm.rank == 1:
            error = trap.fail()
        else:
            with quickly(), pytest.raises(un.CommError) as caught:
                trap.step()
            error = str(caught.value)
        restored = unchanged(gradients(trap.model), before)
        if waits:
            comm.barrier()
        trap.step()
        trap.averager.remove()
        return error, restored, before, gradients(trap.model)

    results = pool("gloo", 2).run(program)
    means = combined([added(result[2], alone(rank)) for rank, result in enumerate(results)])
    assert "rank 1" in results[0][0]
    for _, restored, _, found in results:
        assert restored
        assert same(found, means)


@pytest.mark.parametrize("growth", [1, 2], ids=["equal buckets", "other buckets"])
def test_ranks_with_different_graphs_fail_around_the_first_bucket(growth: int) -> None:
    """A process that ends, as by SIGABRT, shows as `PeerLostError` here."""
    rounds = 4

    def program(comm: un.Communicator) -> list[tuple[bool, Found]]:
        trap, found = Trap(comm, "first", growth=growth, find_unused_parameters=True, **SMALL), []
        short = comm.rank == 1
        for _ in range(rounds):
            trap.model.zero_grad()
            # Rank 0 has sent the last layer by then; rank 1 does not use it, and has sent nothing.
            trap.fail(OddError, un.CommError, short=short)
            restored = all(p.grad is None for p in trap.model.parameters())
            trap.step(short=short)
            found.append((restored, gradients(trap.model)))
        trap.averager.remove()
        return found

    means = combined([alone(0, growth=growth), alone(1, growth=growth, short=True)])
    for found in pool("gloo", 2).run(program):
        assert [restored for restored, _ in found] == [True] * rounds
        assert all(same(each, means) for _, each in found)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_one_that_could_not_be_created_gives_its_parameters_back() -> None:
    models = [torch.jit.script(torch.nn.Linear(1, 1, bias=False)) for _ in range(2)]

    def program(comm: un.Communicator) -> float:
        model = models[comm.rank]
        try:
            un.GradientAverager(model, comm)
        except RuntimeError:
            # The traceback keeps the first one alive.
            un.GradientAverager(model.parameters(), comm)
        else:
            pytest.fail("it was not refused")
        model(torch.full((1, 1), float(comm.rank))).sum().backward()
        return float(model.weight.grad)

    assert run_ranks(program, 2) == [0.5, 0.5]
