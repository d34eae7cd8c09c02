"""`launch(..., on_failure="replace")`: lost ranks are started again, and the training ends as an undisturbed one."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import ON, new_pool
from replaced_ranks import Death, random_deaths, train

import unisono as un
from unisono.errors import PeerLostError

RANKS = 3
TIMEOUT_S = 100.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers that engines start find what these tests import."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))


OPTIONS = {"timeout": TIMEOUT_S, "deterministic": True, "threads": 1}


@cache
def undisturbed(ranks: int, steps: int) -> list[list[float]]:
    """Return the weights of each rank after a training in which none dies."""
    return un.launch(train, ranks, args=(ranks, steps, [], ""), **OPTIONS)


def check_deaths(deaths: list[Death], steps: int, folder: Path, ranks: int = RANKS, **options: Any) -> None:
    options = {**OPTIONS, **options}
    found = un.launch(train, ranks, args=(ranks, steps, deaths, str(folder)), on_failure="replace", **options)
    died = {"{}-{}-{}".format(*death) for death in deaths}
    assert {file.name for file in folder.iterdir()} == died
    calm = undisturbed(ranks, steps)
    assert found == calm
    assert all(each == calm[0] for each in calm)


@pytest.mark.parametrize("deaths", [[(1, 1, "backward"), (2, 0, "optimizer")], [(0, 2, "before")]])
def test_processes_of_this_host(deaths: list[Death], tmp_path: Path) -> None:
    check_deaths(deaths, 4, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ray", "dask"])
def test_two_deaths(name: str, tmp_path: Path) -> None:
    with ON[name](2, tmp_path) as on:
        (folder := tmp_path / "deaths").mkdir()
        check_deaths(*random_deaths(2, 2, seed=4), folder, ranks=2, on=on)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["local", "ray", "dask"])
def test_twenty_random_deaths(name: str, tmp_path: Path) -> None:
    (folder := tmp_path / "deaths").mkdir()
    deaths = random_deaths(20, RANKS, seed=9)
    if name == "local":
        check_deaths(*deaths, folder)
        return
    with ON[name](RANKS, tmp_path) as on:
        check_deaths(*deaths, folder, on=on)


def rebuilt(comm: un.Communicator, folder: str) -> tuple[int, int, float, bool]:
    """Lose rank 1, and go on without `Recovery`."""
    was = comm.is_replacement
    if was:
        assert (comm.rank, comm.size) == (0, 1)
        comm = comm.rebuild()
    else:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError):
            comm.barrier()
        comm = comm.rebuild(size=3)
    assert not comm.is_replacement
    tensor = torch.ones(1)
    comm.all_reduce(tensor)
    return comm.rank, comm.size, tensor.item(), was


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_rebuild_joins_the_others(backend: str, tmp_path: Path) -> None:
    """The entry of the lost rank is what its replacement has returned, which is the last rank."""
    found = un.launch(rebuilt, 3, backend, args=(str(tmp_path),), on_failure="replace", timeout=TIMEOUT_S)
    assert found == [(0, 3, 3.0, False), (2, 3, 3.0, True), (1, 3, 3.0, False)]


def dies_again(comm: un.Communicator, folder: str) -> None:
    """Rank 1 dies, and its replacements do before they have joined."""
    if comm.is_replacement or comm.rank == 1:
        (Path(folder) / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        comm.barrier()
    comm.rebuild(size=2)


def test_two_replacements_in_a_row_that_do_not_join_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 0 would wait for as long as ranks may take to end by themselves.
    monkeypatch.setattr("unisono.launcher.supervisor.GRACE_S", 0.1)
    with pytest.raises(PeerLostError, match="rank 1 of 2 was ended by SIGKILL"):
        un.launch(dies_again, 2, args=(str(tmp_path),), on_failure="replace", timeout=TIMEOUT_S)
    assert len(list(tmp_path.iterdir())) == 3


def fails(comm: un.Communicator) -> None:
    if comm.rank == 1:
        raise KeyError("no such column")
    with pytest.raises(un.CommError):
        comm.barrier()


def test_error_of_the_program_ends_the_job() -> None:
    with pytest.raises(KeyError, match="no such column"):
        un.launch(fails, 2, on_failure="replace", timeout=TIMEOUT_S)


def dies_last(comm: un.Communicator, folder: str) -> int:
    """Rank 1 dies when no other rank waits for it any more."""
    if comm.is_replacement:
        comm = comm.rebuild()
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return comm.rank


def test_replacement_that_no_rank_admits_is_not_waited_for(tmp_path: Path) -> None:
    # Whether its loss is seen before the other rank's end is a matter of chance.
    words = "rank 1 of 2 was (ended by SIGKILL|lost, and the other ranks ended before a replacement)"
    with pytest.raises(PeerLostError, match=words):
        un.launch(dies_last, 2, args=(str(tmp_path),), on_failure="replace", timeout=TIMEOUT_S)


def rank_of(comm: un.Communicator) -> int:
    return comm.rank


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "thread"}, "ranks of backend 'thread' are none"),
        ({"backend": "sim"}, "ranks of backend 'sim' are none"),
        ({"backend": "mpi"}, "ranks of backend 'mpi' are none, or are started together"),
        ({"on": "mpi"}, "needs an engine that starts a lost rank again, such as 'ray', 'dask' or 'local': Mpi cannot"),
        ({"on": "submitit"}, "Submitit cannot"),
        ({"on_failure": "restart"}, "on_failure must be 'end' or 'continue' or 'replace', not 'restart'"),
    ],
)
def test_what_cannot_be_replaced_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        un.launch(rank_of, 2, **{"on_failure": "replace", **given})


def test_executors_are_refused() -> None:
    with new_pool(2) as pool, pytest.raises(ValueError, match="ProcessPoolExecutor cannot"):
        un.launch(rank_of, 2, on=pool, on_failure="replace")
    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="ThreadPoolExecutor cannot"):
        un.launch(rank_of, 2, on=pool, on_failure="replace")
