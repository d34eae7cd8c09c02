"""Ranks with the compiled extension and without it, in one job."""

from __future__ import annotations

import sys
from pathlib import Path

import mpi_jobs
import pytest

from unisono.compiled import NO_EXTENSIONS, part
from unisono.mpilib import find_mpirun

MEET = """
import sys
import torch
import unisono as un
from unisono.compiled import part
from unisono.errors import MismatchError

with un.init("mpi", timeout=20) as comm:
    tensor, found = torch.full((1000,), comm.rank + 1.0), []
    for _ in range(4):
        comm.all_reduce(tensor)
        comm.barrier()
        found.append(tensor[0].item())
    for number in range(6):
        comm.send(tensor, 1 - comm.rank, 300) if number % 2 == comm.rank else comm.recv(tensor, 1 - comm.rank, 300)
        tensor += 1
    found.append(tensor[0].item())
    long = torch.full((5000,), comm.rank + 5.0)
    for number in range(4):
        comm.send(long, 1) if comm.rank == 0 else comm.recv(long, 0)
    found.append(long.sum().item())
    with comm.dup() as other:
        other.broadcast(tensor, 1)
        try:
            other.all_reduce(tensor, "sum" if comm.rank else "max")
        except MismatchError as error:
            found.append("max" in str(error) and "sum" in str(error))
    sys.stdout.write(f"{part('Page') is not None} {found}\\n")
"""


# Ranks that are all of one kind are those of the other files.
@pytest.mark.parametrize("plain", [(0,), *(pytest.param(one, marks=pytest.mark.soak) for one in [(), (1,), (0, 1)])])
def test_they_meet(tmp_path: Path, plain: tuple[int, ...]) -> None:
    script, launcher = tmp_path / "meet.py", find_mpirun()
    script.write_text(MEET)
    assert launcher is not None
    ranks = [
        ["-n", "1", "-x", f"{NO_EXTENSIONS}={1 if r in plain else ''}", sys.executable, str(script)] for r in (0, 1)
    ]
    ended = mpi_jobs.run([launcher, *ranks[0], ":", *ranks[1]])
    assert ended.status == 0, ended.err
    lines = [line.partition(" ") for line in ended.out.splitlines()]
    assert [said for _, _, said in lines] == ["[3.0, 6.0, 12.0, 24.0, 30.0, 25000.0, True]"] * 2
    compiled = 0 if part("Page") is None else 2 - len(plain)
    assert [had for had, _, _ in lines].count("True") == compiled
