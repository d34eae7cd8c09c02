"""A rank whose program ends too early, by itself: the others learn of it immediately, and are not blamed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import sys, torch
import unisono as un

comm = un.init(sys.argv[1], timeout=60)
comm.barrier()
if comm.rank == int(sys.argv[2]):
    sys.exit(int(sys.argv[3]))
comm.all_reduce(torch.ones(2))
"""

Start = Callable[..., Any]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.mark.soak
@pytest.mark.parametrize("status", [0, 3])
def test_early_exit_ends_the_job(start: Start, script: str, port: int, status: int) -> None:
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    stays, ends = [start([sys.executable, script, "shm", "1", str(status)], env | {"RANK": str(r)}) for r in (0, 1)]
    assert ends.wait(60) == status
    assert stays.poll() is None
    _, said = stays.communicate(timeout=300)
    assert stays.returncode == 1
    assert "rank 0 of 2, all_reduce #2 of world: rank 1 has left" in said


@pytest.mark.soak
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_torchrun_reports_the_early_exit(start: Start, script: str, backend: str, culprit: int) -> None:
    assert_root_cause(start, script, backend, culprit)


@pytest.mark.soak
def test_torchrun_reports_a_rank_that_exits_slowly(start: Start, script: str) -> None:
    # Registered first, it runs last, after the other rank has learned that this one leaves.
    Path(script).write_text("import atexit, time\natexit.register(time.sleep, 1.5)\n" + PROGRAM)
    assert_root_cause(start, script, "shm", 0)


def assert_root_cause(start: Start, script: str, backend: str, culprit: int) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    _, said = start([*torchrun, script, backend, str(culprit), "3"]).communicate(timeout=300)
    root = said[said.index("Root Cause") :]
    assert re.search(rf"rank +: {culprit} .*\n *exitcode *: 3 ", root), said


@pytest.mark.soak
def test_forked_child_ends_normally(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "forks.py"
    path.write_text("import os, unisono as un\ncomm = un.init('gloo')\npid = os.fork()\npid and os.waitpid(pid, 0)\n")
    process = start([sys.executable, str(path)])
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
