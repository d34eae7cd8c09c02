"""Programs converted from other libraries compute what they computed there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

import unisono as un

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = DOCS / "examples" / "coming_from"
MPIRUN = ("mpirun", "--map-by", ":OVERSUBSCRIBE", "-n")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str) -> str:
    """Run a command beside this interpreter; what it prints."""
    beside = Path(sys.executable).parent
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **allowed, "OMP_NUM_THREADS": "1", "PATH": f"{beside}:{os.environ['PATH']}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def on_two_ranks(program: str) -> tuple[list[str], float]:
    """Run a program by `unisono run`, in the dataset's order: losses as printed, and the sum of the weights."""
    script = str(PROGRAMS / f"{program}.py")
    output = run(sys.executable, "-m", "unisono", "run", "-n", "2", "--no-prefix", script, "--in-order")
    [total] = re.findall(r"weights sum to (-?\d+\.\d+)", output)
    return re.findall(r"error (\d+\.\d{10})", output), float(total)


def test_pages_link_every_program() -> None:
    pages = sorted((DOCS / "coming-from").glob("*.md"))
    linked = {name for page in pages for name in re.findall(r"examples/coming_from/(\w+\.py)\)", page.read_text())}
    assert linked == {path.name for path in PROGRAMS.glob("*.py")}


def ddp_both(comm: un.Communicator, meeting_place: str) -> tuple[float, float]:
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=comm.rank, world_size=comm.size)
    before = load("ddp_before").train(shuffle=False)
    dist.destroy_process_group()
    return before, load("ddp_after").train(comm, shuffle=False)


def test_ddp_and_the_averager_end_with_the_same_bits(tmp_path: Path) -> None:
    results = un.launch(ddp_both, 2, "gloo", (str(tmp_path / "store"),), timeout=60)
    assert len({total for result in results for total in result}) == 1


@pytest.mark.parametrize("ranks", [3, pytest.param(7, marks=pytest.mark.soak)])
def test_mpi_program_is_independent_of_the_number_of_ranks(ranks: int) -> None:
    solve = load("mpi4py_after").solve
    [(steps, mean)] = un.launch(solve, 1, "thread", (10, 1e-3))
    assert 50 < steps < 200
    assert 0.4 < mean < 0.5
    # Cells are computed alike on any number of ranks.
    assert un.launch(solve, ranks, "thread", (10, 1e-3)) == [(steps, mean)] * ranks


def test_horovod_program_learns() -> None:
    results = un.launch(load("horovod_after").train, 2, "thread")
    assert results[0] == results[1]
    assert results[0][0] > 0.95


def test_accelerate_program_is_independent_of_the_number_of_ranks() -> None:
    train = load("accelerate_after").train
    [alone] = un.launch(train, 1, "thread", kwargs={"batch": 16})
    together = un.launch(train, 3, "sim", kwargs={"batch": 16})  # threads would share torch's generator
    assert together == pytest.approx([alone] * 3, rel=1e-9)


def test_deepspeed_program_resumes_on_other_ranks(tmp_path: Path) -> None:
    train = load("deepspeed_after").train
    [whole] = un.launch(train, 1, "thread", (str(tmp_path / "whole"),))
    # Ranks on threads would share torch's generator: simulated ranks take turns.
    assert un.launch(train, 2, "sim", (str(tmp_path / "parts"), 9))[0][0] == 9
    assert un.launch(train, 3, "sim", (str(tmp_path / "parts"),)) == [(16, pytest.approx(whole[1], abs=1e-5))] * 3


def test_torchft_program_loses_a_rank_and_nothing_else() -> None:
    train = load("torchft_after").train
    [(_, steps, alone)] = un.launch(train, 1, "thread")
    ends: list[Any] = un.launch(train, 3, "shm", kwargs={"kill": (1, 5)}, on_failure="continue", timeout=60)
    assert steps == 16
    assert ends[0] == ends[2] == (2, 16, pytest.approx(alone, rel=1e-9))
    assert "ended by SIGKILL" in str(ends[1])


@pytest.mark.soak
def test_accelerate_and_fabric_compute_the_same() -> None:
    errors, total = on_two_ranks("accelerate_after")
    found, accelerate = on_two_ranks("accelerate_before")
    assert len(errors) == 3
    assert found == errors
    assert accelerate == pytest.approx(total, rel=1e-10)
    assert on_two_ranks("fabric_before")[1] == pytest.approx(total, rel=1e-10)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 4])
def test_mpi4py_computes_the_same(ranks: int) -> None:
    before, after = (
        run(*MPIRUN, str(ranks), sys.executable, str(PROGRAMS / f"mpi4py_{which}.py")) for which in ("before", "after")
    )
    assert before == after
    assert re.fullmatch(r"\d+ steps, mean heat 0\.\d{12}\n", before)
