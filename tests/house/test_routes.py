"""Number of functions of this package that a call runs, and of their files; equal in the first and in later calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import unisono as un
from unisono.host.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="no compiler was here when unisono was installed")

OURS = str(Path(un.__file__).parent)
MOST, MOST_FILES = 12, 6
MOST_OF_A_PASS, MOST_FILES_OF_A_PASS = 37, 12
REDUCED = [
    *((torch.float32, op) for op in ("sum", "avg", "product", "min", "max")),
    *((dtype, "sum") for dtype in (torch.uint8, torch.int64, torch.float64, torch.complex64, torch.bool)),
    *((dtype, "avg") for dtype in (torch.float16, torch.bfloat16, torch.float64)),
    *((torch.int32, op) for op in ("band", "bor", "bxor", "product")),
    *((dtype, op) for dtype in (torch.complex64, torch.complex128) for op in ("sum", "avg", "product")),
]


def counted(call: Callable[[], object]) -> tuple[int, int]:
    """Functions that a call runs, and files that these are in."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            seen.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(seen), len(set(seen))


def of_single_tensors(comm: un.Communicator) -> dict[str, Callable[[], object]]:
    peer, one = 1 - comm.rank, torch.ones(4)

    def strided(count: int) -> torch.Tensor:
        return torch.ones(count, 2)[:, 0]

    ends = [lambda: comm.send(torch.ones(4), peer), lambda: comm.recv(torch.ones(4), peer)]
    return {
        **{f"all_reduce {d} {o}": lambda d=d, o=o: comm.all_reduce(torch.ones(5, dtype=d), o) for d, o in REDUCED},
        "all_reduce, 4 MiB": lambda: comm.all_reduce(torch.ones(1 << 20)),
        "broadcast": lambda: comm.broadcast(torch.ones(4), 1),
        "reduce": lambda: comm.reduce(torch.ones(4), 1),
        "all_gather_single": lambda: comm.all_gather_single(torch.ones(8), torch.ones(4)),
        "reduce_scatter_single": lambda: comm.reduce_scatter_single(torch.ones(4), torch.ones(8)),
        "all_to_all_single": lambda: comm.all_to_all_single(torch.ones(8), torch.ones(8)),
        "barrier": comm.barrier,
        "send": ends[comm.rank],
        "recv": ends[peer],
        "all_reduce, strided": lambda: comm.all_reduce(strided(4)),
        "broadcast, strided": lambda: comm.broadcast(strided(4), 1),
        "reduce, strided": lambda: comm.reduce(strided(4), 1),
        "all_gather_single, strided": lambda: comm.all_gather_single(strided(8), strided(4)),
        "reduce_scatter_single, strided": lambda: comm.reduce_scatter_single(strided(4), strided(8)),
        "all_to_all_single, strided": lambda: comm.all_to_all_single(strided(8), strided(8)),
        "a parameter": lambda: comm.all_reduce(torch.nn.Parameter(torch.ones(4))),
        "the very same tensor": lambda: comm.all_reduce(one),
    }


def of_lists(comm: un.Communicator) -> dict[str, tuple[Callable[[], object], int]]:
    """Each with the number of its listed tensors."""
    here, size = comm.rank == 0, comm.size

    def tensors() -> list[torch.Tensor]:
        return [torch.ones(4) for _ in range(size)]

    return {
        "gather": (lambda: comm.gather(torch.ones(4), tensors() if here else None, 0), 2),
        "scatter": (lambda: comm.scatter(torch.ones(4), tensors() if here else None, 0), 2),
        "all_gather": (lambda: comm.all_gather(tensors(), torch.ones(4)), 2),
        "reduce_scatter": (lambda: comm.reduce_scatter(torch.ones(4), tensors()), 2),
        "all_to_all": (lambda: comm.all_to_all(tensors(), tensors()), 4),
    }


def all_counts(comm: un.Communicator) -> dict[str, tuple[int, int]]:
    """The counts of one rank."""
    comm.barrier()
    calls = of_single_tensors(comm) | {name: call for name, (call, _) in of_lists(comm).items()}
    found = {}
    for name, call in calls.items():
        found[name] = counted(call)
        comm.barrier()
    return found


def too_many(comm: un.Communicator) -> list[str]:
    """The calls of one rank that run too much, the first time or later."""
    comm.barrier()
    found = []
    calls = {name: (call, 0) for name, call in of_single_tensors(comm).items()} | of_lists(comm)
    for turn in range(3):
        for name, (call, listed) in calls.items():
            functions, files = counted(call)
            if functions > MOST + listed or files > MOST_FILES:
                found.append(f"{name}: {functions} functions in {files} files, turn {turn}")
            comm.barrier()
    return found


def test_call_runs_few_functions() -> None:
    assert un.launch(too_many, 2, "shm", timeout=30) == [[], []]


def of_backward(comm: un.Communicator) -> list[tuple[int, int]]:
    """Return the functions run by backward passes of an averaged model with four parameters, from the first hook on."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    averager = un.GradientAverager(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4) + comm.rank).square().mean()
        found.append(counted(loss.backward))
        optimizer.step()
    averager.remove()
    return found


def test_backward_pass_runs_few_functions() -> None:
    for passes in un.launch(of_backward, 2, "shm", timeout=30):
        for functions, files in passes:
            assert (functions <= MOST_OF_A_PASS, files <= MOST_FILES_OF_A_PASS) == (True, True), passes


if __name__ == "__main__":
    for name, (functions, files) in un.launch(all_counts, 2, "shm", timeout=30)[0].items():
        print(f"{name:40} {functions:4} functions in {files} files")
