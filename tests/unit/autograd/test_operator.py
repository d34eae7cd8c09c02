"""Differentiable calls: order in backward, refusals, compilers and function transforms."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from insides import engine_of

import unisono as un
from unisono import autograd as ag
from unisono.testing import pool, run_ranks


def ones() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def first_line(program: Callable[..., Any]) -> str:
    return f"{os.path.basename(__file__)}:{program.__code__.co_firstlineno + 1}"


# -- backward passes that differ ---------------------------------------------------------------------------
def in_another_order(comm: un.Communicator) -> str:
    first, second = ag.all_reduce(ones(), comm), ag.all_reduce(ones(), comm)
    with pytest.raises(un.errors.MismatchError) as caught:
        (first if comm.rank == 0 else second).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("backend", ["thread", "sim", "shm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_another_order_is_a_mismatch_on_every_rank(backend: str) -> None:
    ranks = (
        pool(backend, 2).run(in_another_order)
        if backend in ("shm", "gloo")
        else run_ranks(in_another_order, 2, backend)
    )
    for text in ranks:
        # The collectives differ in nothing else.
        assert "ranks differ in adjoint_of: rank 0" in text
        assert text.count(f"backward of {first_line(in_another_order)}") >= 2


def without_one_output(comm: un.Communicator) -> str:
    used, unused = ag.all_reduce(ones(), comm), ag.all_reduce(ones(), comm)
    total = used.sum() if comm.rank == 0 else used.sum() + unused.sum()
    with pytest.raises(un.errors.MismatchError, match="adjoint of call"):
        total.backward()
    return "refused"


def test_an_output_unused_on_one_rank_is_a_mismatch() -> None:
    assert run_ranks(without_one_output, 2) == ["refused"] * 2


def without_backward(comm: un.Communicator) -> str:
    y = ag.all_reduce(ones(), comm)
    if comm.rank:
        time.sleep(60)  # of the simulation
        return ""
    with pytest.raises(un.errors.CommTimeoutError) as caught:
        y.sum().backward()
    return str(caught.value)


def test_an_error_names_the_forward_call_that_waits() -> None:
    assert f"backward of {first_line(without_backward)}" in run_ranks(without_backward, 2, "sim")[0]


def messages_in_another_order(comm: un.Communicator) -> None:
    move = ag.send if comm.rank == 0 else ag.recv
    first, second = move(ones(), comm, 1 - comm.rank), move(ones(), comm, 1 - comm.rank)
    (first if comm.rank == 0 else second).sum().backward()


def test_messages_in_another_order_are_a_mismatch() -> None:
    with pytest.raises(un.errors.MismatchError, match=r"gradient of its differentiable message 2, but .* of message 1"):
        run_ranks(messages_in_another_order, 2)


# -- ranks that take part ----------------------------------------------------------------------------------
def with_one_rank_that_needs_gradients(comm: un.Communicator) -> Any:
    x = torch.full((2,), 1.0 + comm.rank, requires_grad=comm.rank == 1)
    (ag.all_reduce(x, comm) ** 2).sum().backward()
    return x.grad


def test_ranks_without_gradients_take_part() -> None:
    none, found = run_ranks(with_one_rank_that_needs_gradients, 2)
    assert none is None
    assert found.tolist() == [12.0, 12.0]


def test_without_gradients_there_is_no_history() -> None:
    with un.init() as comm, torch.no_grad():
        assert not ag.all_reduce(ones(), comm).requires_grad


def test_a_graph_outlives_no_communicator() -> None:
    with un.init() as comm:
        y = ag.all_reduce(ones(), comm)
    with pytest.raises(un.errors.ClosedError, match="closed"):
        y.sum().backward()
    del comm
    with pytest.raises(un.errors.ClosedError, match=r"closed|keep it until backward"):
        y.sum().backward()


# -- refusals ----------------------------------------------------------------------------------------------
WRONG: list[tuple[str, type[Exception], Callable[[un.Communicator], object]]] = [
    ("torch.int64 has no gradients: use comm.all_reduce", ValueError, lambda c: ag.all_reduce(torch.ones(2).long(), c)),
    ("takes a torch.Tensor, not list", TypeError, lambda c: ag.all_gather([1.0], c)),  # type: ignore[arg-type]
    ("op='band' has no gradient", ValueError, lambda c: ag.all_reduce(ones(), c, "band")),
    ("use un.autograd.all_reduce", ValueError, lambda c: ag.reduce(ones(), c, 0, "max")),
    ("a list of 1 tensors", ValueError, lambda c: ag.scatter([], c, 0)),
    ("dst=3", ValueError, lambda c: ag.gather(ones(), c, 3)),
    ("add up to 2", ValueError, lambda c: ag.all_to_all_single(ones(), c, [3], [2])),
    ("at least one dimension", ValueError, lambda c: ag.all_to_all_single(ones().sum(), c)),
]


@pytest.mark.parametrize(("text", "kind", "call"), WRONG, ids=[row[0] for row in WRONG])
def test_wrong_arguments_are_refused(
    text: str, kind: type[Exception], call: Callable[[un.Communicator], object]
) -> None:
    with un.init() as comm, pytest.raises(kind, match=re.escape(text)):
        call(comm)


def test_plain_calls_name_the_differentiable_ones() -> None:
    with un.init() as comm, pytest.raises(ValueError, match=r"un\.autograd\.all_reduce"):
        comm.all_reduce(ones() * 2)


# -- compilers and transforms ------------------------------------------------------------------------------
def all_in_one(x: torch.Tensor, comm: un.Communicator) -> torch.Tensor:
    """Return a result of nearly all collectives; some are called twice alike, and one for nothing."""
    y = ag.all_reduce(x * 2, comm) + ag.all_reduce(x * 2, comm)
    ag.all_reduce(x, comm)
    y = torch.cat(ag.all_gather(y * ag.all_reduce(x, comm, "max"), comm))
    y = ag.reduce_scatter(y.view(comm.size, -1).unbind(), comm, "avg")
    y = ag.broadcast(y, comm, 0) + ag.reduce(y, comm, 1)
    y = ag.all_reduce(ag.all_to_all_single(y, comm) / 100, comm, "product")
    return y + (ag.send(y, comm, 1).sum() if comm.rank == 0 else ag.recv(y, comm, 0))


def compiled(comm: un.Communicator, backend: str) -> list[Any]:
    results = []
    for call in (all_in_one, torch.compile(all_in_one, backend=backend, fullgraph=True)):
        x = (torch.arange(4.0, dtype=torch.float64) + comm.rank).requires_grad_()
        before = engine_of(comm).activity.calls
        y = call(x, comm)
        y.sum().backward()
        results.append((y.detach(), x.grad, engine_of(comm).activity.calls - before))
    return results


# Ranks that are threads cannot run torch's later stages side by side.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
@pytest.mark.skipif(
    sys.version_info >= (3, 14) and torch.__version__ < (2, 10), reason="torch 2.9 compiles nothing on Python 3.14"
)
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("eager", "thread"),
        pytest.param("aot_eager", "shm", marks=pytest.mark.soak),
        pytest.param("inductor", "shm", marks=pytest.mark.soak),
    ],
)
def test_whole_graphs_compile(backend: str, ranks: str) -> None:
    for plain, whole in run_ranks(compiled, 2, ranks, backend, timeout=60):
        torch.testing.assert_close(whole[:2], plain[:2])
        # Calls that are alike, or whose result is unused, are made all the same; that in backward is not.
        assert whole[2] == plain[2]


def transformed(comm: un.Communicator) -> dict[str, torch.Tensor]:
    x = torch.arange(1.0, 4.0, dtype=torch.float64) + comm.rank
    rows = torch.ones(2, 3, dtype=torch.float64) * comm.rank
    squares = lambda x: (ag.all_reduce(x, comm) ** 2).sum()  # noqa: E731
    found = {
        "grad": torch.func.grad(squares)(x),
        "vjp": torch.func.vjp(lambda x: ag.all_reduce(x, comm, "product"), x)[1](x)[0],
        "jacrev": torch.func.jacrev(torch.func.jacrev(squares))(x),
        "vmap": torch.func.vmap(lambda x: torch.cat(ag.all_gather(x, comm)))(rows),
        "vmap of grad": torch.func.vmap(torch.func.grad(lambda x: (ag.all_reduce(x, comm, "max") ** 2).sum()))(rows),
    }
    return {name: t.detach() for name, t in found.items()}


def test_transforms() -> None:
    for rank, found in enumerate(run_ranks(transformed, 2)):
        assert found["grad"].tolist() == [12.0, 20.0, 28.0]
        # Of each rank's element, times the sum of both ranks' cotangents.
        assert found["vjp"].tolist() == [[2 * 3, 3 * 5, 4 * 7], [1 * 3, 2 * 5, 3 * 7]][rank]
        assert found["jacrev"].tolist() == (8 * torch.eye(3)).tolist()
        assert found["vmap"].tolist() == [[0.0] * 3 + [1.0] * 3] * 2
        assert found["vmap of grad"].tolist() == [[4.0 * rank] * 3] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode_is_refused() -> None:
    with un.init() as comm, pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda x: ag.all_reduce(x, comm), (torch.ones(2),), (torch.ones(2),))


def test_unused_outputs_and_empty_tensors() -> None:
    with un.init() as comm:
        x = torch.empty(0, 3, requires_grad=True)
        ag.all_to_all_single(x, comm).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (0, 3)
        assert not ag.all_gather_v(x, comm)[0].numel()


def test_reduce_takes_op_where_all_reduce_does() -> None:
    def program(comm: un.Communicator) -> list[float]:
        x = ones() * (comm.rank + 1)
        calls = [ag.reduce(x, comm, "avg", 1), ag.reduce(x, comm, 1, "avg"), ag.reduce(x, comm), ag.reduce(x, comm, 1)]
        return [y.flatten()[0].item() for y in calls]

    assert run_ranks(program, 3) == [[0, 0, 6, 0], [2, 2, 0, 6], [0, 0, 0, 0]]
