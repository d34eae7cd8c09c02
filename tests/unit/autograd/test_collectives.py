"""Differentiable collectives equal one process; each mutant of an adjoint is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_graphs import BY_ONE, BY_RANKS, argument, check_graphs, fit
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono as un
from unisono import autograd as ag
from unisono.autograd import operator
from unisono.testing import run_ranks

CALLS: list[tuple[str, Any]] = [
    *(("all_reduce", op) for op in operator.REDUCTIONS),
    *(("reduce", (1, op)) for op in operator.LINEAR),
    *(("reduce_scatter", op) for op in operator.LINEAR),
    ("reduce_scatter of parts", [0, 2, 1]),
    ("broadcast", 1),
    ("all_gather", None),
    ("all_gather_v", [2, 0, 3]),
    ("all_to_all", None),
    ("all_to_all_v", [[0, 1, 2], [1, 1, 1], [3, 0, 0]]),
    ("all_to_all_single", [[0, 1, 2], [1, 1, 1], [3, 0, 0]]),
    ("gather", 1),
    ("scatter", 1),
    ("send", (0, 1)),
]
SIZE = 3


@pytest.mark.parametrize(("size", "count"), [(2, 9), (3, 8), pytest.param(4, 16, marks=pytest.mark.soak)])
def test_random_graphs(size: int, count: int) -> None:
    check_graphs(size, range(count))


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_random_graphs(size: int) -> None:
    for first in range(0, 2000, 100):
        check_graphs(size, range(first, first + 100))


# -- each collective ---------------------------------------------------------------------------------------
def inputs(rank: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return elements of which some are zero, and some equal on several ranks, where none depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-2, 3, (size, 2), generator=generator).to(dtype)
    return values * (1 + 0.5j) if dtype.is_complex else values


def loss(y: torch.Tensor, rank: int) -> torch.Tensor:
    exact = y.to(torch.complex128 if y.is_complex() else torch.float64)
    return ((1 + fit(exact, SIZE)).abs() ** 2 * (1 + rank)).sum()


def gradient(comm: un.Communicator, name: str, given: Any, dtype: torch.dtype) -> torch.Tensor:
    x = inputs(comm.rank, comm.size, dtype).requires_grad_()
    (found,) = torch.autograd.grad(loss(BY_RANKS[name](x, comm, given), comm.rank), x)
    return found


def check(name: str, given: Any, dtype: torch.dtype = torch.float64) -> None:
    """Assert that three ranks and one process compute the same gradients of one collective."""
    xs = [inputs(r, SIZE, dtype).requires_grad_() for r in range(SIZE)]
    total = sum((loss(y, r) for r, y in enumerate(BY_ONE[name](xs, given))), torch.zeros(()))
    wanted = torch.autograd.grad(total, xs, allow_unused=True, materialize_grads=True)
    found = run_ranks(gradient, SIZE, "thread", name, given, dtype)
    torch.testing.assert_close(found, list(wanted))


@pytest.mark.parametrize(("name", "given"), CALLS, ids=str)
def test_each_collective(name: str, given: Any) -> None:
    check(name, given)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    check(name, "product" if dtype.is_complex else "sum", dtype)


def check_numerically(comm: un.Communicator, name: str, width: int, seed: int, fast: bool) -> bool:
    """Check gradients of one collective against differences, all ranks in step.

    Each rank's input is a part of one that all ranks hold alike, by a mean: its gradient adds up those of all ranks.
    """
    # Apart, so that no difference crosses from one minimum to another.
    order = torch.randperm(comm.size**2 * width, generator=torch.Generator().manual_seed(seed))
    whole = order.double().view(comm.size, comm.size, width).requires_grad_()
    given = argument(name, comm.size, random.Random(seed))

    def results(x: torch.Tensor) -> torch.Tensor:
        part = ag.all_reduce(x / 10, comm, "avg")[comm.rank]
        return torch.cat([t.reshape(-1) for t in ag.all_gather_v(BY_RANKS[name](part, comm, given), comm)])

    y = results(whole)
    # Given, because ranks as threads share torch's generator.
    grads = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).requires_grad_()
    return torch.autograd.gradcheck(results, whole, fast_mode=fast) and torch.autograd.gradgradcheck(
        results, whole, grads, fast_mode=fast
    )


@settings(max_examples=4)
@given(st.sampled_from(list(BY_RANKS)), st.integers(2, 4), st.integers(0, 2), st.integers(0, 99))
def test_gradcheck(name: str, size: int, width: int, seed: int) -> None:
    assert all(run_ranks(check_numerically, size, "thread", name, width, seed, True))


@pytest.mark.soak
@settings(max_examples=200, deadline=None)
# Of an empty tensor, torch's check element by element finds no column to compare.
@given(st.sampled_from(list(BY_RANKS)), st.integers(2, 4), st.integers(1, 2), st.integers(0, 99))
def test_gradcheck_of_every_element(name: str, size: int, width: int, seed: int) -> None:
    assert all(run_ranks(check_numerically, size, "thread", name, width, seed, False))


# -- mutants -----------------------------------------------------------------------------------------------
TABLE = {
    "all_reduce": ("broadcast", 0, "sum"),
    "broadcast": ("all_reduce", -1, 1),
    "reduce": ("all_reduce", -1, (1, "sum")),
    "all_gather": ("scatter", 0, None),
    "reduce_scatter": ("gather", 0, "sum"),
    "gather": ("reduce_scatter", -1, 1),
    "scatter": ("all_gather", -1, 1),
}
"""For each collective, another one of the same numbers of elements, with a root, and an argument of the first."""
Linear = Callable[..., torch.Tensor]


OF_LINEAR: Linear = operator.gradient_of_linear
"""The derivative of linear collectives, which the wrong ones below call."""


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_entry_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other, root, example = TABLE[name]

    def mutant(grad: torch.Tensor, receipt: torch.Tensor, call: list[Any]) -> torch.Tensor:
        return OF_LINEAR(grad, receipt, [*call[:4], root, *call[5:]] if call[0] == name else call)

    monkeypatch.setitem(operator.ADJOINTS, name, other)
    monkeypatch.setattr(operator, "gradient_of_linear", mutant)
    with pytest.raises(AssertionError, match="not close"):
        check(name, example)


@pytest.mark.parametrize(("name", "given"), CALLS, ids=str)
@pytest.mark.parametrize("mutate", [lambda g: 2 * g, lambda g: g + 1], ids=["twice", "shifted"])
def test_a_wrong_gradient_is_found(
    name: str, given: Any, mutate: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for attribute in ("gradient_of_linear", "gradient_of_reduction"):
        whole = getattr(operator, attribute)

        def mutant(
            grad: torch.Tensor, receipt: torch.Tensor, call: list[Any], *rest: Any, whole: Linear = whole
        ) -> Any:
            return mutate(whole(grad, receipt, call, *rest))

        monkeypatch.setattr(operator, attribute, mutant)
    with pytest.raises(AssertionError, match="not close"):
        check(name, given)


def test_sizes_that_are_not_transposed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(grad: torch.Tensor, receipt: torch.Tensor, call: list[Any]) -> torch.Tensor:
        return OF_LINEAR(grad, receipt, [*call[:6], *call[:5:-1]])

    monkeypatch.setattr(operator, "gradient_of_linear", mutant)
    with pytest.raises((un.CommError, RuntimeError)):
        check("all_to_all_single", [[0, 1, 2], [1, 1, 1], [3, 0, 0]])


def test_a_mean_that_is_not_divided_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        operator, "gradient_of_linear", lambda g, r, call: OF_LINEAR(g, r, [*call[:3], "sum", *call[4:]])
    )
    for name, example in [("all_reduce", "avg"), ("reduce", (1, "avg")), ("reduce_scatter", "avg")]:
        with pytest.raises(AssertionError, match="not close"):
            check(name, example)


@pytest.mark.parametrize("op", ["product", "max"])
def test_wrong_weights_are_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unshared(g: torch.Tensor, r: torch.Tensor, call: list[Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = operator.apply_call(g, r, *call[:3], "sum", *call[4:])
        return total * (x == y) if op == "max" else total * torch.nan_to_num(y / x)

    monkeypatch.setattr(operator, "gradient_of_reduction", unshared)
    with pytest.raises(AssertionError, match="not close"):
        check("all_reduce", op)
