"""Tests of code for torch.distributed, on ranks that are threads, simulated ranks, or processes."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torch_test_programs import PROGRAMS, SIZE

import unisono as un
from unisono.errors import DeadlockError, UnavailableError
from unisono.testing import pools
from unisono.testing.marked_ranks import MarkedRanks

BACKENDS = ["thread", "sim", "process"]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all programs: a change of the environment would start ranks that are processes again."""
    shared = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_TEST_FOLDER", str(shared))
        yield shared


# Torch warns of what it is about to rename.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program_runs_as_under_torchrun(program: Callable[[], None], backend: str, folder: Path) -> None:
    # What another program or backend has written is not read.
    shutil.rmtree(folder)
    folder.mkdir()
    # Each program raises where something is wrong.
    assert un.testing.torch_ranks(SIZE, backend).run(program) == [None] * SIZE


@pytest.mark.ranks(2, torch=True)
def test_marked_test_has_a_group() -> None:
    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    assert tensor.item() == 3


@pytest.mark.ranks(2, torch=True)
@pytest.mark.parametrize("factor", [1, 10])
def test_marked_test_may_take_its_communicator(comm: un.Communicator, factor: int) -> None:
    assert factor * comm.rank == factor * dist.get_rank()


@pytest.mark.ranks("values", torch=True)
@settings(max_examples=5)
@given(values=st.lists(st.integers(-100, 100), min_size=1, max_size=4))
def test_marked_test_takes_examples(values: list[int]) -> None:
    tensor = torch.tensor([values[dist.get_rank()]])
    dist.all_reduce(tensor)
    assert tensor.item() == sum(values)


@settings(max_examples=5)
@given(number=st.integers(-100, 100))
@un.testing.torch_ranks(2)
def test_decorated_test_takes_examples(number: int) -> None:
    tensor = torch.tensor([number])
    dist.all_reduce(tensor)
    assert tensor.item() == 2 * number


class TestOfUnittest(unittest.TestCase):
    @un.testing.torch_ranks(2)
    def test_on_threads(self) -> None:
        assert dist.get_world_size() == 2

    @un.testing.torch_ranks(2, "process")
    def test_on_processes(self) -> None:
        with self.subTest("the same"):
            assert dist.get_world_size() == 2


def test_fixture_runs_programs(torch_ranks: Callable[..., MarkedRanks]) -> None:
    def program() -> int:
        return dist.get_rank()

    assert torch_ranks(2).run(program) == torch_ranks(2, "process").run(program) == [0, 1]


# -- what is the process's is each rank's ----------------------------------------------------------
def test_torch_is_left_as_it_was() -> None:
    def names() -> list[object]:
        return [os.environ, dist.distributed_c10d._world, threading.Thread.start, torch.manual_seed, random.seed]

    before = names()
    with pytest.raises(ZeroDivisionError):
        un.testing.torch_ranks(2).run(lambda: 1 // 0)
    assert [a is b for a, b in zip(names(), before, strict=True)] == [True] * len(before)
    assert not dist.is_initialized()


def test_threads_of_a_rank_belong_to_it() -> None:
    def program() -> int:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(dist.get_rank()))
        thread.start()
        thread.join()
        return seen[0]

    assert un.testing.torch_ranks(3).run(program) == [0, 1, 2]


def test_ranks_of_a_rank_are_their_own() -> None:
    def inner() -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    def program() -> tuple[list[tuple[int, int]], int]:
        found = un.testing.torch_ranks(1).run(inner)
        return found, dist.get_world_size()

    assert un.testing.torch_ranks(2).run(program) == [([(0, 1)], 2)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_environment_of_a_rank_is_its_own(backend: str) -> None:
    def program() -> tuple[str, bool, str | None, bool]:
        os.environ["RANK"] += "0"
        del os.environ["LOCAL_RANK"]
        dist.barrier()
        whole = os.environ.copy()
        return os.environ["RANK"], "LOCAL_RANK" in whole, whole.get("WORLD_SIZE"), whole == dict(os.environ | {})

    found = un.testing.torch_ranks(2, backend).run(program)
    assert found == [("00", False, "2", True), ("10", False, "2", True)]
    assert "RANK" not in os.environ


class Numbers(Dataset[float]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        return index + random.random() + torch.rand(1).item()


# Python 3.12 warns of forks of a process with threads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_worker_of_a_data_loader_seeds_itself() -> None:
    def program() -> int:
        return len(list(DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork")))

    assert un.testing.torch_ranks(2).run(program) == [3, 3]


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_patches_of_a_rank_end_with_its_test(backend: str) -> None:
    def test(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "7")
        monkeypatch.delenv("WORLD_SIZE")
        monkeypatch.setattr(random, "choice", None)
        dist.barrier()
        assert os.environ["RANK"] == "7"
        assert random.choice is None

    def is_patched() -> bool:
        return random.choice is None

    with pytest.MonkeyPatch.context() as monkeypatch:
        un.testing.torch_ranks(2, backend)(test)(monkeypatch=monkeypatch)
    assert not {"RANK", "WORLD_SIZE"} & os.environ.keys()
    assert un.testing.torch_ranks(2, backend).run(is_patched) == [False, False]


def test_decorated_coroutine_is_one_and_returns_its_result() -> None:
    @un.testing.torch_ranks(2)
    async def test() -> int:
        await asyncio.sleep(0)
        return dist.get_world_size()

    assert asyncio.run(test()) == 2


@pytest.mark.parametrize("profile", [torch.profiler.profile, torch.autograd.profiler.profile])
@pytest.mark.parametrize("backend", ["thread", "sim"])
def test_profiler_of_all_ranks_is_refused(backend: str, profile: Any) -> None:
    def program() -> None:
        with profile():
            dist.barrier()

    with pytest.raises(UnavailableError, match=r"rank \d of 2: .*profile starts the profiler of all ranks"):
        un.testing.torch_ranks(2, backend).run(program)


@pytest.mark.parametrize("backend", BACKENDS)
def test_seed_of_a_rank_of_its_own_is_kept(backend: str) -> None:
    def program() -> float:
        torch.manual_seed(dist.get_rank() // 2)
        dist.barrier()
        return torch.rand(1).item()

    first, second, third = un.testing.torch_ranks(3, backend).run(program)
    assert first == second != third


# -- failures --------------------------------------------------------------------------------------
def test_other_rank_or_size_is_refused() -> None:
    def program() -> None:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=0, world_size=5)

    with pytest.raises(ValueError, match=r"was given (rank=0|world_size=5), but the test gives this rank"):
        un.testing.torch_ranks(2).run(program)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_each_rank_are_shown(backend: str) -> None:
    def program() -> None:
        dist.barrier()
        assert dist.get_rank() == 0, f"a value of rank {dist.get_rank()}"

    with pytest.raises(AssertionError) as caught:
        un.testing.torch_ranks(3, backend).run(program)
    shown = f"{caught.value}\n" + "\n".join(caught.value.__notes__)
    assert "a value of rank 1" in shown
    assert "a value of rank 2" in shown


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_that_fails_ends_the_others(backend: str) -> None:
    def program() -> None:
        if dist.get_rank() == 1:
            raise KeyError("no such sample")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(KeyError) as caught:
        un.testing.torch_ranks(3, backend).run(program)
    assert any("raised on rank 1 of 3" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("backend", [pytest.param("thread", marks=pytest.mark.soak), "sim", "process"])
def test_hang_names_ranks_and_lines(backend: str) -> None:
    def program() -> None:
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(DeadlockError) as caught:
        un.testing.torch_ranks(3, backend, timeout=2.0).run(program)
    line = program.__code__.co_firstlineno
    shown = str(caught.value)
    assert f"{Path(__file__).name}:{line + 2}" in shown
    assert f"{Path(__file__).name}:{line + 3}" in shown
    assert all(f"rank {rank} " in shown for rank in range(3))


def test_seed_replays_a_race() -> None:
    """Which rank's message arrives first."""

    def program() -> list[int]:
        tensor = torch.tensor([dist.get_rank()])
        if dist.get_rank() == 0:
            return [dist.recv(tensor) for _ in range(3)]
        dist.send(tensor, 0)
        return []

    def order(seed: int) -> list[int]:
        found: list[int] = un.testing.torch_ranks(4, "sim", seed=seed).run(program)[0]
        return found

    orders = [order(seed) for seed in range(8)]
    assert [order(seed) for seed in range(8)] == orders
    assert len(set(map(tuple, orders))) > 1


def test_examples_after_a_deadlock_wait_as_long_as_quick_ones_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis tries some fifty smaller ones: each that waited a second would make it a minute."""
    real = pools.pool
    timeouts: list[float] = []

    def noted(backend: str, size: int, **options: Any) -> Any:
        timeouts.append(options["timeout"])
        return real(backend, size, **options)

    monkeypatch.setattr(pools, "pool", noted)
    ranks = MarkedRanks(2, timeout=4.0)
    # One of them is quick, on a busy machine too.
    for _ in range(10):
        ranks.run(int)
    ranks.deadlocked = True
    ranks.run(int)
    assert timeouts[:-1] == [4.0] * 10
    assert timeouts[-1] < 1.0
