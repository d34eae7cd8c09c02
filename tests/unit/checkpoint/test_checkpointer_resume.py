"""Training that is killed goes on as if it had not been: the same samples in the same order, and the same weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.testing import run_ranks

TRAINER = Path(__file__).parents[1] / "checkpoint_trainer.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


def killed(folder: Path, kills: int, *ranks: int) -> float:
    """Return the difference of the weights from an uninterrupted run on the first number of ranks."""
    given = [sys.executable, str(TRAINER), str(folder), str(kills), *map(str, ranks)]
    quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(given, capture_output=True, text=True, env={**os.environ, **quiet}, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"] == kills
    return float(found["furthest"])


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_killed_30_times_on_the_same_number_of_ranks(folder: Path, ranks: int) -> None:
    assert killed(folder, 30, ranks) == 0.0


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [(1, 2, 3, 4), (2, 4, 1, 3), (3, 1, 4, 2), (4, 3, 2, 1)])
def test_killed_30_times_on_changing_numbers_of_ranks(folder: Path, ranks: tuple[int, ...]) -> None:
    """Round and round: every number comes after every other one."""
    assert killed(folder, 30, *ranks) < 1e-9


def test_ranks_at_different_steps(tmp_path: Path) -> None:
    data = range(23)

    def begin(comm: un.Communicator) -> list[int]:
        sampler = un.data.PartitionSampler(data, comm, seed=2)
        seen = [index for _, index in zip(range(2 + comm.rank), sampler, strict=False)]
        sampler.advance(len(seen))
        un.checkpoint.save(tmp_path, {"sampler": sampler}, comm)
        return seen

    def end(comm: un.Communicator) -> list[int]:
        sampler = un.data.PartitionSampler(data, comm, seed=9)
        un.checkpoint.load(tmp_path, {"sampler": sampler}, comm)
        return list(sampler)

    before = list(chain.from_iterable(run_ranks(begin, 3)))
    for ranks in (1, 2, 3, 4):
        assert sorted(chain(before, *run_ranks(end, ranks))) == list(data)


def test_killed_process_and_its_peer(folder: Path) -> None:
    """One of two processes is killed in the middle of a save; the other learns of it, and the old one loads."""

    def program(comm: un.Communicator, path: str) -> None:
        un.checkpoint.save(path, {"w": torch.zeros(50_000)}, comm)

        def die(done: int, total: int) -> None:
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        un.checkpoint.save(path, {"w": torch.ones(50_000)}, comm, progress=die)

    errors = un.launch(program, 2, "gloo", (str(folder / "x"),), timeout=20, threads=1, on_failure="continue")
    assert all(isinstance(error, un.errors.PeerLostError) for error in errors), errors
    assert not un.checkpoint.load(folder / "x")["w"].any()
    un.checkpoint.save(folder / "x", {"w": torch.ones(3)})
    assert len(list((folder / "x").iterdir())) == 2
