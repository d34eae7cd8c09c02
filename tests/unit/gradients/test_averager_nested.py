"""Backward passes inside others: all of them are one step, averaged once, when the outermost one ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, Literal, cast

import torch
from averaged_models import gradients, same
from averager_helpers import BACKENDS, SMALL, Found, combined, sample, stack, weight
from pairwise import short
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.testing import pool

ROUNDS, WEIGHTS = 2, [3.0, 1.0]
OPTIONS = ["plain", "weights", "sum", "accumulated", "unused"]

Inner = Callable[[], None]


def hooked(tensor: torch.Tensor, inner: Inner) -> torch.Tensor:
    """Run a backward pass as soon as the gradient of this tensor is known."""

    def hook(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            inner()

    tensor.register_hook(hook)
    return tensor


def before(model: nn.Sequential, x: torch.Tensor, inner: Inner) -> torch.Tensor:
    return hooked(model[2](model[1](model[0](x))), inner)


def after(model: nn.Sequential, x: torch.Tensor, inner: Inner) -> torch.Tensor:
    return cast("torch.Tensor", model[2](model[1](hooked(model[0](x), inner))))


def twice(model: nn.Sequential, x: torch.Tensor, inner: Inner) -> torch.Tensor:
    return hooked(model[2](model[1](hooked(model[0](x), inner))), inner)


def deep(model: nn.Sequential, x: torch.Tensor, inner: Inner) -> torch.Tensor:
    """Three levels: the inner pass runs in a pass over one layer, which runs in the outer pass."""
    return hooked(model[2](model[1](model[0](x))), lambda: hooked(model[1](x), inner).sum().backward())


def of_nothing(model: nn.Sequential, x: torch.Tensor, inner: Inner) -> torch.Tensor:
    """An outer pass that reaches no parameter."""
    return hooked(x.clone().requires_grad_() * 2.0, inner)


def twice_of_nothing(model: nn.Sequential, x: torch.Tensor, inner: Inner) -> torch.Tensor:
    return hooked(hooked(x.clone().requires_grad_() * 2.0, inner) * 2.0, inner)


def checkpointed(model: nn.Sequential, x: torch.Tensor, inner: Inner) -> torch.Tensor:
    hidden = checkpoint(model[1], hooked(model[0](x), inner), use_reentrant=True)
    return hooked(model[2](checkpoint(model[1], torch.tanh(hidden), use_reentrant=True)), inner)


NESTS = {nest.__name__: nest for nest in (before, after, twice, deep, of_nothing, twice_of_nothing, checkpointed)}
WITH_OUTER = [name for name in NESTS if "nothing" not in name]


def one_pass(model: nn.Sequential, rank: int, nest: str, inner: Inner) -> None:
    NESTS[nest](model, sample(rank), inner).square().mean().backward()


def inner_pass(model: nn.Sequential, rank: int, *, further: bool, quiet: AbstractContextManager[None]) -> None:
    """A pass over all layers with other samples; over the fourth one too, if `further`."""
    found = model[2](model[1](model[0](sample(rank + 10))))
    with quiet:
        (model[3](found) if further else found).sum().backward()


def no_inner_pass() -> None:
    """Do nothing: the outer pass has none inside."""


def step(
    model: nn.Sequential, averager: un.GradientAverager | None, rank: int, nest: str, option: str, inner: str
) -> None:
    """A step of training, of an averaged model or of one alone.

    Args:
        model: It has four layers.
        averager: Its averager, if it has one.
        rank: The rank whose samples are used.
        nest: One of NESTS.
        option: One of OPTIONS.
        inner: Where the inner pass runs: "all" ranks, "quiet" for all in `no_sync`, or "one" rank alone.
    """
    no_sync = nullcontext if averager is None else averager.no_sync
    if option == "accumulated":
        with no_sync():
            model[1](model[0](sample(rank + 20))).sum().backward()
    if option == "weights" and averager is not None:
        averager.weight(WEIGHTS[rank])

    def runs() -> None:
        quiet = no_sync() if inner == "quiet" else nullcontext()
        inner_pass(model, rank, further=option == "unused" and rank == 0, quiet=quiet)

    one_pass(model, rank, nest, no_inner_pass if inner == "one" and rank == 0 else runs)


def averaged(
    comm: un.Communicator, nest: str, option: str, inner: str, sizes: dict[str, Any]
) -> tuple[list[Found], Any]:
    """The gradients after each step, and how many steps were counted."""
    model = stack(count=4)
    average: Literal["sum", "mean"] = "sum" if option == "sum" else "mean"
    averager = un.GradientAverager(model, comm, average=average, find_unused_parameters=option == "unused", **sizes)
    found = []
    for _ in range(ROUNDS):
        model.zero_grad()
        step(model, averager, comm.rank, nest, option, inner)
        found.append(gradients(model))
    steps = averager.state_dict()["steps"]
    averager.remove()
    return found, steps


def wanted(nest: str, option: str, inner: str) -> Found:
    """The gradients that one process computes from both ranks' samples."""
    alone = []
    for rank in range(2):
        model = stack(count=4)
        step(model, None, rank, nest, option, inner)
        alone.append(gradients(model))
    return combined(alone, WEIGHTS if option == "weights" else None, total=option == "sum")


def assert_averages(backend: str, nest: str, option: str, inner: str, sizes: dict[str, Any]) -> None:
    means = wanted(nest, option, inner)
    for found, steps in pool(backend, 2).run(lambda comm: averaged(comm, nest, option, inner, sizes)):
        for each in found:
            assert same(each, means)
        assert steps == ROUNDS


SIZES: dict[str, dict[str, Any]] = {"shm": {}, "gloo": SMALL}


@short(
    "backend, nest, option",
    product(SIZES, NESTS, OPTIONS),
    list(zip(["shm", "gloo"] * 3 + ["shm"], NESTS, (OPTIONS * 2)[:7], strict=True)),
)
def test_nested_passes_are_averaged_with_the_outer_one(backend: str, nest: str, option: str) -> None:
    assert_averages(backend, nest, option, "all", SIZES[backend])


@short("nest, option", product(NESTS, OPTIONS), list(zip(NESTS, (OPTIONS * 2)[2:9], strict=True)))
def test_nested_pass_in_no_sync_belongs_to_the_outer_one(nest: str, option: str) -> None:
    assert_averages("thread", nest, option, "quiet", SMALL)


@short(
    "backend, nest, option",
    product(SIZES, WITH_OUTER, OPTIONS[:4]),
    list(zip(["gloo", "shm", "gloo", "shm", "gloo"], WITH_OUTER, [*OPTIONS[:4], "plain"], strict=True)),
)
def test_nested_pass_on_one_rank_is_averaged_with_the_outer_one(backend: str, nest: str, option: str) -> None:
    assert_averages(backend, nest, option, "one", SIZES[backend])


def watched(model: nn.Sequential) -> list[torch.Tensor]:
    """Values of the second layer's `p.grad`, one for each time that more has been added."""
    seen: list[torch.Tensor] = []

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    weight(model, 1).register_post_accumulate_grad_hook(hook)
    return seen


def used_twice(model: nn.Sequential, rank: int, width: int) -> None:
    hidden = checkpoint(model[1], model[0](sample(rank, width)), use_reentrant=True)
    hidden = checkpoint(model[1], torch.tanh(hidden), use_reentrant=True)
    model[2](hidden).square().mean().backward()


@short(
    "backend, width, small, kept",
    product(BACKENDS, [4, 256], [True, False], ["nothing", "accumulated", "left"]),
    [
        ("thread", 4, True, "nothing"),
        ("shm", 256, False, "accumulated"),
        ("gloo", 4, True, "left"),
        ("gloo", 256, False, "nothing"),
    ],
)
def test_earlier_hooks_see_the_same_as_without_the_averager(backend: str, width: int, small: bool, kept: str) -> None:
    cap = width * width * 8 / 2**20 if small else 25.0

    def program(comm: un.Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor], Found, Found]:
        model, alone = stack(width), stack(width)
        seen, shown = watched(model), watched(alone)
        averager = un.GradientAverager(model, comm, bucket_cap_mb=cap, first_bucket_mb=cap)
        if kept != "nothing":
            with averager.no_sync() if kept == "accumulated" else nullcontext():
                used_twice(model, comm.rank, width)
        for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
            other.grad = None if parameter.grad is None else parameter.grad.clone()
        seen.clear()
        used_twice(model, comm.rank, width)
        used_twice(alone, comm.rank, width)
        averager.remove()
        return seen, shown, gradients(model), gradients(alone)

    results = pool(backend, 2).run(program)
    means = combined([alone for _, _, _, alone in results])
    for seen, shown, found, _ in results:
        assert len(seen) == len(shown) == 2
        assert all(torch.allclose(one, other) for one, other in zip(seen, shown, strict=True))
        assert same(found, means)
