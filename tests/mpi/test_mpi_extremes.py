"""Expensive tests: messages past 2**31 elements, and a rank that stops inside of MPI."""

from __future__ import annotations

from pathlib import Path

import mpi_jobs
import pytest

LONG = """
count = 2**31 + 5
with un.init("mpi", timeout=300) as comm:
    assert comm.size == 2
    tensor = torch.full((count,), 3 + comm.rank, dtype=torch.int8)
    tensor[-1] = 7 - comm.rank
    comm.all_reduce(tensor, "max")
    right = [int(tensor.min()), int(tensor.max()), int(tensor[-1])] == [4, 7, 7]
    tensor.fill_(comm.rank)
    comm.broadcast(tensor, 1)
    right = right and int(tensor.min()) == 1
    if comm.rank == 0:
        tensor[-1] = 9
        comm.send(tensor, 1)
    else:
        comm.recv(tensor, 0)
    right = right and int(tensor[-1]) == 9 and int(tensor[:-1].max()) == 1
    print(f"rank {comm.rank} right {right}", flush=True)
"""

STOPS = """
import time
comm = un.init("mpi", timeout=3)
tensor = torch.ones(1 << 22)
comm.broadcast(tensor, 0)
if comm.rank == 1:
    # It has said that it comes, and then does not.
    native = comm._engine.transport._native
    native.carry = lambda *call: time.sleep(1000)
comm.broadcast(tensor, 0)
print("through", flush=True)
"""


@pytest.mark.soak
def test_more_than_2_to_32_elements(tmp_path: Path) -> None:
    ended = mpi_jobs.mpirun(tmp_path, LONG)
    assert ended.status == 0, ended.err
    assert sorted(ended.out.split("\n")) == ["", "rank 0 right True", "rank 1 right True"], ended.out


@pytest.mark.soak
def test_rank_stopped_inside_mpi_ends_the_job(tmp_path: Path) -> None:
    ended = mpi_jobs.mpirun(tmp_path, STOPS)
    assert ended.status != 0
    assert not ended.left
    assert "through" not in ended.out
    assert "all ranks had reached a collective" in ended.err
    assert "the job is ended" in ended.err
