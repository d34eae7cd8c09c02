"""Tensors of inference mode, which torch forbids to be changed outside of it."""

from __future__ import annotations

import pytest
import torch

import unisono as un
from unisono.testing import pool


def on_threads(fn: object, size: int = 2) -> list[object]:
    return un.launch(fn, size, "thread", timeout=60.0)


def test_calls_in_inference_mode() -> None:
    def program(comm: un.Communicator) -> list[float]:
        with torch.inference_mode():
            t = torch.ones(4)
            comm.all_reduce(t)
            comm.all_reduce(t, async_op=True).wait()
        return t.tolist()

    assert on_threads(program) == [[4.0] * 4] * 2


@pytest.mark.parametrize("algorithm", ["one_shot", "ring"])
def test_calls_alternate_in_and_out_of_inference_mode(algorithm: str) -> None:
    def program(comm: un.Communicator) -> list[float]:
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                t = torch.ones(4)
                comm.all_reduce(t, algorithm=algorithm)
        return t.tolist()

    assert on_threads(program, 3) == [[3.0] * 4] * 3


@pytest.mark.parametrize(
    ("backend", "check"), [("thread", "auto"), ("thread", "full"), ("shm", "auto"), ("gloo", "auto")]
)
def test_inference_tensor_is_accepted_outside_inference_mode(backend: str, check: str) -> None:
    def program(comm: un.Communicator) -> list[float]:
        with torch.inference_mode():
            t = torch.ones(4)
        strided = t.view(2, 2).t()
        comm.all_reduce(t)
        comm.all_reduce(t, "avg")
        comm.all_reduce(strided, async_op=True).wait()
        comm.broadcast(t, 0)
        comm.send(t, 1) if comm.rank == 0 else comm.recv(t, 0)
        return t.tolist()

    assert pool(backend, 2, check=check).run(program) == [[4.0] * 4] * 2


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_calls_after_inference_mode_and_with_its_tensors(backend: str) -> None:
    def program(comm: un.Communicator) -> tuple[list[float], list[list[float]]]:
        with torch.inference_mode():
            comm.all_reduce(torch.ones(3), algorithm="ring")
            made = [torch.ones(3, 2)[:, 0] for _ in range(4)] + [torch.ones(3) for _ in range(4)]
        outside = torch.ones(3)
        comm.all_reduce(outside, algorithm="ring")
        for first in (0, 4):
            comm.all_reduce(made[first])
            comm.all_reduce(made[first + 1], "avg")
            comm.all_reduce(made[first + 2], "max", async_op=True).wait()
            other = 1 - comm.rank
            comm.sendrecv(torch.full((3,), 5.0), other, made[first + 3], other)
        return outside.tolist(), [t.tolist() for t in made]

    results = [[2.0] * 3, [1.0] * 3, [1.0] * 3, [5.0] * 3]
    assert pool(backend, 2).run(program) == [([2.0] * 3, results * 2)] * 2


@pytest.mark.parametrize("receiver", [0, 1])
def test_any_thread_may_write_to_an_inference_tensor(receiver: int) -> None:
    def program(comm: un.Communicator) -> list[float]:
        with torch.inference_mode(comm.rank == receiver):
            t = torch.full((4,), float(comm.rank))
            work = comm.irecv(t, 1 - receiver) if comm.rank == receiver else None
        comm.barrier()
        if work is None:
            comm.send(t, receiver)
        else:
            work.wait()
        return t.tolist()

    assert on_threads(program) == [[1.0 - receiver] * 4] * 2
