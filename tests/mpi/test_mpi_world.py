"""One job under mpirun, in which every rank runs many checks; the tests read their results."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import mpi_jobs
import pytest

from unisono.host.mpi_library import find_mpirun

RANKS = 2
# The job ends within this time of what has ended it, on a busy machine.
SOON_S = 10.0


# Once a process, in whatever order its tests come.
@pytest.fixture(scope="session")
def job() -> tuple[mpi_jobs.Ended, float]:
    """Return how the job ended, and when."""
    program = str(Path(__file__).with_name("mpi_program.py"))
    return mpi_jobs.run([str(find_mpirun()), "-n", str(RANKS), sys.executable, program]), time.time()


@pytest.fixture(scope="session")
def found(job: tuple[mpi_jobs.Ended, float]) -> list[dict[str, Any]]:
    """Return the results of each rank."""
    ended, _ = job
    told = [json.loads(line.removeprefix("=== ")) for line in ended.out.splitlines() if line.startswith("=== ")]
    assert len(told) == RANKS, ended.out + ended.err
    return sorted(told, key=lambda one: one["bootstraps"]["mpi"][0])


@pytest.mark.parametrize(("asked", "backend"), [("gloo", "gloo"), ("shm", "shm"), ("auto", "shm"), ("mpi", "mpi")])
def test_every_backend_works_under_mpirun(found: list[dict[str, Any]], asked: str, backend: str) -> None:
    for rank, one in enumerate(found):
        assert one["bootstraps"][asked] == [rank, RANKS, backend, [[0, 1]], [2.0, 1.0]]


def test_mpi_can_be_required(found: list[dict[str, Any]]) -> None:
    assert [one["bootstraps"]["mpi://"] for one in found] == [[0, 2], [1, 2]]
    assert [one["bootstraps"]["apart"] for one in found] == ["mpi", "mpi"]


def test_local_rank_is_set_by_mpi(found: list[dict[str, Any]]) -> None:
    assert [one["local_rank"] for one in found] == [0, 1]


def test_user_communicators_are_wrapped_and_not_freed(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        assert one["adopted"] == {
            "world": [rank, 2, [0, 1], 1],
            "backwards": [1 - rank, 2, [1, 0], 1],
            "alone": [0, 1, [rank], 1],
            "owner's": "mine",
        }


def test_invalid_communicator_is_rejected(found: list[dict[str, Any]]) -> None:
    wrong, null = found[0]["refused"]
    assert wrong.startswith("TypeError")
    assert "mpi4py" in wrong
    assert null.startswith("ValueError")
    assert "COMM_NULL" in null


def test_reductions_unsupported_by_mpi_are_correct(found: list[dict[str, Any]]) -> None:
    for one in found:
        wrong = {name: said for name, said in one["reductions"].items() if said != "right"}
        assert not wrong
        assert len(one["reductions"]) == 14


def test_long_calls_are_split(found: list[dict[str, Any]]) -> None:
    for one in found:
        wrong = {name for name, right in one["long_ones"].items() if not right}
        assert not wrong
        assert len(one["long_ones"]) == 9


def test_missing_rank_is_named(found: list[dict[str, Any]]) -> None:
    said = found[0]["timeouts"]
    assert len(said) == 2
    assert all("rank 1" in sentence for sentence in said), said


def test_nonzero_exit_status_ends_the_job(job: tuple[mpi_jobs.Ended, float]) -> None:
    ended, moment = job
    assert ended.status == 3, ended.err
    assert not ended.left
    assert "rank 1 of 2 ends the job by sys.exit(3)" in ended.err
    assert "rank 0 of 2 ends the job" not in ended.err
    works = [float(word) for word in re.findall(r"works at ([\d.]+)", ended.out)]
    assert moment - max(works) < SOON_S
