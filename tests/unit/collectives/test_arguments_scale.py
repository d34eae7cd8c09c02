"""`all_reduce(scale=)`: each contribution is multiplied first, on every backend; the factor is compared."""

from __future__ import annotations

import re

import pytest
import torch

import unisono as un
from unisono.errors import MismatchError
from unisono.testing import pool

BACKENDS = ("thread", "shm", "tcp", "gloo", "sim", "shm+tcp")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


def contribution(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(1.0, 7.0) * (rank + 1)).to(dtype)


def scaled(comm: un.Communicator) -> None:
    for dtype in DTYPES:
        for op in ("sum", "avg"):
            for algorithm in (None, "ring"):
                wanted = sum(
                    (contribution(rank, dtype) * 0.5 for rank in range(comm.size)), torch.zeros(6, dtype=dtype)
                )
                if op == "avg":
                    wanted /= comm.size
                for async_op in (False, True):
                    x = contribution(comm.rank, dtype)
                    work = comm.all_reduce(x, op, scale=0.5, algorithm=algorithm, async_op=async_op)
                    if work is not None:
                        work.wait()
                    torch.testing.assert_close(x, wanted)
    strided = torch.zeros(6, 2)
    strided[:, 0] = contribution(comm.rank, torch.float32)
    comm.all_reduce(strided[:, 0], scale=2)
    assert strided.sum().item() == 2 * 21 * sum(range(1, comm.size + 1))
    # Each is representable once it is scaled, and their sum too.
    large = torch.full((2,), 61_440.0, dtype=torch.float16)
    comm.all_reduce(large, scale=1 / 64)
    assert large.tolist() == [960.0 * comm.size] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_contributions_are_scaled_first(backend: str) -> None:
    pool(backend, 3).run(scaled)


def different(comm: un.Communicator) -> tuple[str, list[float]]:
    own = comm.dup()
    x = torch.ones(3)
    with pytest.raises(MismatchError) as caught:
        own.all_reduce(x, scale=0.5 + comm.rank // 2)
    return str(caught.value), x.tolist()


def only_some(comm: un.Communicator) -> tuple[str, list[float]]:
    own = comm.dup()
    x = torch.ones(3)
    with pytest.raises(MismatchError) as caught:
        own.all_reduce(x, scale=0.5 if comm.rank else None)
    return str(caught.value), x.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_factors_that_differ_are_refused_before_anything_moves(backend: str) -> None:
    for text, left in pool(backend, 3).run(different):
        assert re.search(r"ranks differ in 'scale': ranks 0, 1: 0.5; rank 2: 1.5 \(at test_arguments_scale", text), text
        assert left == [1.0] * 3
    for text, left in pool(backend, 3).run(only_some):
        assert re.search(r"agree\('scale'\) at test_arguments_scale.*", text), text
        assert left == [1.0] * 3


def test_wrong_factors_are_refused() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(ValueError, match="scale needs a floating or complex dtype, not int64"):
            comm.all_reduce(torch.ones(2, dtype=torch.int64), scale=0.5)
        with pytest.raises(ValueError, match="scale is for sums and averages, not for 'max'"):
            comm.all_reduce(torch.ones(2), "max", scale=0.5)
        with pytest.raises(TypeError, match="scale must be a number, not str"):
            comm.all_reduce(torch.ones(2), scale="0.5")  # type: ignore[call-overload]
        comm.barrier()

    un.launch(program, 2, "thread")


def derived(comm: un.Communicator) -> tuple[float, float]:
    x = torch.tensor([1.0 + comm.rank], dtype=torch.float64, requires_grad=True)
    y = un.autograd.all_reduce(x, comm, scale=0.25)
    (y * (1 + comm.rank)).sum().backward()
    assert x.grad is not None
    return y.item(), x.grad.item()


def test_gradient_is_scaled_too() -> None:
    assert un.launch(derived, 3, "thread") == [(1.5, 1.5)] * 3


def differently_derived(comm: un.Communicator) -> None:
    un.autograd.all_reduce(torch.ones(1, requires_grad=True), comm, scale=1.0 + comm.rank)


def test_factors_of_differentiable_sums_are_compared() -> None:
    with pytest.raises(MismatchError, match="ranks differ in 'scale'"):
        un.launch(differently_derived, 2, "shm")
