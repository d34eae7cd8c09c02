"""Functions and files of this package that a call runs in the caller's thread.

A test holds the fast path of shared memory, where each function costs. The other calls have goals, which
`python tests/house/test_routes.py` prints beside today's counts.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from nccl_stand_in import around
from torch import nn

import unisono as un
from unisono.host.native import native
from unisono.testing import run_ranks

OURS = str(Path(un.__file__).parent)
ALL_REDUCE = (7, 5)
FAST_PATH = (12, 6)
FAST_PATH_OF_LISTS = (14, 6)
REDUCED = [
    *((torch.float32, op) for op in ("sum", "avg", "product", "min", "max")),
    *((dtype, "sum") for dtype in (torch.uint8, torch.int64, torch.float64, torch.complex64, torch.bool)),
    *((dtype, "avg") for dtype in (torch.float16, torch.bfloat16, torch.float64)),
    *((torch.int32, op) for op in ("band", "bor", "bxor", "product")),
    *((dtype, op) for dtype in (torch.complex64, torch.complex128) for op in ("sum", "avg", "product")),
]

GOALS = {
    ("all_reduce", "shm"): "7 / 5",
    ("all_reduce", "thread"): "110 / 18 / 55",
    ("all_reduce, ring", "shm"): "25 / 9",
    ("averager step of 4 parameters", "thread"): "110 / 18",
    ("ShardedModel step", "shm"): "250 / 10",
    ("checkpoint.save of 6 entries", "shm"): "500 / 15",
    ("checkpoint.load of 6 entries", "shm"): "700 / 16",
    ("rpc_sync", "shm"): "60 / 9",
}
"""By call of one of two ranks and backend: functions, files, moves between files. A remote call polls as it waits."""


def counted(call: Callable[[], object]) -> tuple[int, int, int]:
    """Functions that a call runs, the files that these are in, and how often the file changes from call to call."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), len(set(files)), sum(one != other for one, other in itertools.pairwise(files))


def fast_calls(comm: un.Communicator) -> dict[str, tuple[Callable[[], object], tuple[int, int]]]:
    """Calls that take the fast path, each with the most functions and files that it may run."""
    peer, here = 1 - comm.rank, comm.rank == 0
    tensor = torch.ones(4)

    def strided(count: int) -> torch.Tensor:
        return torch.ones(count, 2)[:, 0]

    def pair() -> list[torch.Tensor]:
        return [torch.ones(4) for _ in range(2)]

    reductions: dict[str, Callable[[], object]] = {
        **{f"all_reduce {d} {o}": lambda d=d, o=o: comm.all_reduce(torch.ones(5, dtype=d), o) for d, o in REDUCED},
        "all_reduce, 4 MiB": lambda: comm.all_reduce(torch.ones(1 << 20)),
        "all_reduce, the very same tensor": lambda: comm.all_reduce(tensor),
    }
    others: dict[str, Callable[[], object]] = {
        "all_reduce, strided": lambda: comm.all_reduce(strided(4)),
        "all_reduce, a parameter": lambda: comm.all_reduce(nn.Parameter(torch.ones(4))),
        "barrier": comm.barrier,
        "send, recv": lambda: (comm.send if here else comm.recv)(torch.ones(4), peer),
        "recv, send": lambda: (comm.recv if here else comm.send)(torch.ones(4), peer),
    }
    for kind, make in (("contiguous", torch.ones), ("strided", strided)):
        others |= {
            f"broadcast, {kind}": lambda make=make: comm.broadcast(make(4), 1),
            f"reduce, {kind}": lambda make=make: comm.reduce(make(4), 1),
            f"all_gather_single, {kind}": lambda make=make: comm.all_gather_single(make(8), make(4)),
            f"reduce_scatter_single, {kind}": lambda make=make: comm.reduce_scatter_single(make(4), make(8)),
            f"all_to_all_single, {kind}": lambda make=make: comm.all_to_all_single(make(8), make(8)),
        }
    lists: dict[str, Callable[[], object]] = {
        "gather": lambda: comm.gather(torch.ones(4), pair() if here else None, 0),
        "scatter": lambda: comm.scatter(torch.ones(4), pair() if here else None, 0),
        "all_gather": lambda: comm.all_gather(pair(), torch.ones(4)),
        "reduce_scatter": lambda: comm.reduce_scatter(torch.ones(4), pair()),
        "all_to_all": lambda: comm.all_to_all(pair(), pair()),
    }
    kinds = ((reductions, ALL_REDUCE), (others, FAST_PATH), (lists, FAST_PATH_OF_LISTS))
    return {name: (call, most) for calls, most in kinds for name, call in calls.items()}


def too_many(comm: un.Communicator) -> list[str]:
    """The calls of one rank that run too much, the first time or later."""
    calls = fast_calls(comm)
    comm.barrier()
    found = []
    for turn in range(3):
        for name, (call, most) in calls.items():
            functions, files, _ = counted(call)
            if functions > most[0] or files > most[1]:
                found.append(f"{name}: {functions} functions in {files} files, turn {turn}")
            comm.barrier()
    return found


@pytest.mark.skipif(native() is None, reason="no compiler was here when unisono was installed")
def test_fast_path_runs_few_functions() -> None:
    assert un.launch(too_many, 2, "shm", timeout=30) == [[], []]


@pytest.mark.parametrize(("wrap", "device", "most"), [(around, "meta", (16, 10)), (None, "cpu", (24, 13))])
def test_a_sum_of_torch_runs_few_functions(wrap: Any, device: str, most: tuple[int, int]) -> None:
    """NCCL's is compared beside the call, gloo's before."""

    def program(comm: un.Communicator) -> list[tuple[int, int, int]]:
        tensor = torch.ones(4, device=device)
        for _ in range(3):
            comm.all_reduce(tensor)
        return [counted(lambda: comm.all_reduce(tensor)) for _ in range(3)]

    for found in run_ranks(program, 2, "gloo", wrap=wrap):
        assert max(functions for functions, _, _ in found) <= most[0]
        assert max(files for _, files, _ in found) <= most[1]


def small_step(model: nn.Module, optimizer: Any) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

    return step


def counts_of_goals(comm: un.Communicator, folder: str) -> dict[str, tuple[int, int, int]]:
    """The fewest of each of this rank's calls, of those that are made again."""
    averaged, sharded = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    # Keeps the hooks.
    averager = un.GradientAverager(averaged, comm)
    optimizer = un.sharding.ShardedModel(sharded, comm).optimizer(torch.optim.SGD, lr=0.1)
    state = {name: torch.ones(4) for name in "abcdef"}
    paths = (f"{folder}/{number}" for number in itertools.count())
    un.rpc.init(comm, trusted=True)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(torch.ones(4)),
        "all_reduce, ring": lambda: comm.all_reduce(torch.ones(4), algorithm="ring"),
        "averager step of 4 parameters": small_step(averaged, torch.optim.SGD(averaged.parameters(), lr=0.1)),
        "ShardedModel step": small_step(sharded, optimizer),
        "checkpoint.save of 6 entries": lambda: un.checkpoint.save(next(paths), state, comm=comm),
        "checkpoint.load of 6 entries": lambda: un.checkpoint.load(f"{folder}/0", state, comm=comm),
        "rpc_sync": lambda: un.rpc.rpc_sync(1 - comm.rank, torch.add, args=(torch.ones(2), torch.ones(2))),
    }
    found = {}
    for name, call in calls.items():
        counts = []
        for _ in range(8):
            comm.barrier()
            counts.append(counted(call))
        found[name] = min(counts)
    un.rpc.shutdown()
    averager.remove()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        today = {name: un.launch(counts_of_goals, 2, name, args=(f"{made}/{name}",))[0] for name in ("shm", "thread")}
    print(f"{'functions / files / moves between files':56}{'today':18}goal")
    for (what, backend), goal in GOALS.items():
        print(f"{f'{what}, {backend}':56}{' / '.join(map(str, today[backend][what])):18}{goal}")
