"""Algorithms that reduce, on tensors: where each serves, and what it says where it does not."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

import unisono as un
from unisono.collectives.algorithms import ALGORITHMS, find, serving


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"].names())
def test_segments_of_any_size_give_equal_bits(name: str) -> None:
    algorithm = find("all_reduce", name)
    size = 4 if algorithm.unsupported(5) else 5
    inputs = [torch.randn(37, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    if not algorithm.same_bits:
        inputs = [(100 * t).int() for t in inputs]

    def program(comm: un.Communicator) -> torch.Tensor:
        t = inputs[comm.rank].clone()
        comm.all_reduce(t, algorithm=name)
        return t

    whole, *cut = (un.launch(program, size, "thread", chunk_bytes=each) for each in (1 << 30, 1, 63))
    assert all(torch.equal(t, whole[0]) for t in (*whole, *chain(*cut)))
    assert torch.allclose(whole[0], torch.stack(inputs).sum(0, dtype=inputs[0].dtype), atol=1e-5)


@pytest.mark.parametrize("op", ["sum", "avg", "product"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_rounded_results_need_an_algorithm_that_keeps_bits(op: str, dtype: torch.dtype) -> None:
    def program(comm: un.Communicator) -> str:
        with pytest.raises(ValueError, match="the all_reduce algorithm 'swing_latency'") as caught:
            comm.all_reduce(torch.ones(3, dtype=dtype), op, algorithm="swing_latency")
        return str(caught.value)

    said = un.launch(program, 2, "thread")[0]
    assert "rounded sums would differ between ranks; it serves integers, booleans, min and max; known: " in said
    assert "latency" not in said.partition("known here")[2]


def test_exact_results_need_no_such_algorithm() -> None:
    def program(comm: un.Communicator) -> list[float]:
        total, least = torch.tensor([comm.rank + 1]), torch.tensor([0.5 - comm.rank])
        comm.all_reduce(total, algorithm="swing_latency")
        comm.all_reduce(least, "min", algorithm="bine_latency")
        return [total.item(), least.item()]

    assert un.launch(program, 8, "thread") == [[36, -6.5]] * 8


def test_power_of_two_is_demanded_in_one_sentence() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(
            ValueError, match="the all_reduce algorithm 'swing' needs a power of two, not 3 ranks; known"
        ):
            comm.all_reduce(torch.ones(3), algorithm="swing")

    un.launch(program, 3, "thread")


@pytest.mark.parametrize("size", [3, pytest.param(6, marks=pytest.mark.soak), 8])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce"])
def test_every_algorithm_reduces_any_length(collective: str, size: int) -> None:
    def program(comm: un.Communicator) -> None:
        for name in serving(collective, comm.size, rounded=False):
            for numel, dtype in ((0, torch.int8), (1, torch.int32), (size + 1, torch.int64), (97, torch.bool)):
                inputs = [torch.arange(numel).add(r).remainder(5).to(dtype) for r in range(comm.size)]
                t = inputs[comm.rank].clone()
                if collective == "reduce":
                    comm.reduce(t, 1, algorithm=name)
                else:
                    comm.all_reduce(t, algorithm=name)
                if collective == "all_reduce" or comm.rank == 1:
                    assert torch.equal(t, torch.stack(inputs).sum(0).to(dtype)), (name, numel, dtype)

    un.launch(program, size, "thread")
