"""Files of shells on the pages of docs/recipes: Slurm, torchrun, mpirun."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher_helpers import finish
from recipe_helpers import FILES, PAGES, env, heard, program

Start = Callable[..., "subprocess.Popen[str]"]

SHELLS = sorted(name for name in FILES if name.endswith(".sh"))


def test_every_file_has_a_page_that_says_what_happens_when_a_worker_dies() -> None:
    assert FILES.keys() == {
        *("slurm.sh", "torchrun.sh", "mpirun.sh", "kubernetes.yaml", "jobset.yaml", "trainjob.yaml"),
        *("compose.yaml", "skypilot.yaml", "on_ray.py"),
    }
    for page in PAGES.glob("*.md"):
        text = page.read_text()
        if 'title="' in text:
            assert re.search("a (rank|worker) dies", text, re.IGNORECASE), page.name
            assert f"recipes/{page.name}" in (PAGES.parent / "how-to" / "launchers.md").read_text()


@pytest.mark.parametrize("name", SHELLS)
def test_shell_files_are_valid_shell(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    subprocess.run(["bash", "-n", path], check=True, timeout=300)


SRUN = """#!/bin/bash
# Two tasks on one node, as srun would start them.
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do
    SLURM_JOB_ID=$JOB SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=gnode10 \\
        SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
done
wait
"""


def test_slurm(start: Start, folder: Path) -> None:
    program(folder, "srun", SRUN)
    job = str(os.getpid())
    (folder / "job.sh").write_text(FILES["slurm.sh"])
    done = start(["bash", "job.sh", "--lr", "0.1"], env(folder, JOB=job, SLURM_JOB_ID=job), folder)
    assert heard(finish(done), "--lr", "0.1")


def test_slurm_accepts_its_options() -> None:
    """The command sbatch heeds only what stands before the first command, and takes a whole line."""
    options = []
    for line in FILES["slurm.sh"].splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            options.append(line.split(" ", 1)[1])
    assert {option.partition("=")[0] for option in options} >= {"--nodes", "--ntasks-per-node", "--time"}
    assert not [option for option in options if " " in option]


@pytest.mark.soak
def test_torchrun(start: Start, folder: Path) -> None:
    (folder / "torchrun.sh").write_text(FILES["torchrun.sh"])
    assert heard(finish(start(["bash", "torchrun.sh", "--lr", "0.1"], env(folder), folder)), "--lr", "0.1")


@pytest.mark.soak
def test_torchrun_on_two_hosts(start: Start, folder: Path, port: int) -> None:
    (folder / "torchrun.sh").write_text(FILES["torchrun.sh"])
    same = {"NODES": "2", "RANKS": "1", "HEAD": "127.0.0.1", "PORT": str(port), "UNISONO_SECRET": "x"}
    hosts = [start(["bash", "torchrun.sh"], env(folder, **same, NODE=str(node)), folder) for node in (0, 1)]
    assert heard("".join(finish(host) for host in hosts))


@pytest.mark.parametrize("missing", ["HEAD", "NODE", "UNISONO_SECRET"])
def test_torchrun_reports_missing_settings(start: Start, folder: Path, missing: str) -> None:
    (folder / "torchrun.sh").write_text(FILES["torchrun.sh"])
    given = {"NODES": "2", "HEAD": "127.0.0.1", "NODE": "0", "UNISONO_SECRET": "x"}
    del given[missing]
    done = start(["bash", "torchrun.sh"], env(folder, **given), folder)
    _, err = done.communicate(timeout=300)
    assert done.returncode != 0
    assert f"set {missing} to" in err


MPIRUN = """#!/bin/bash
if [ "$1" = --version ]; then echo "$SAYS"; exit; fi
printf '%s ' "$@" > asked
"""


@pytest.mark.parametrize(
    ("says", "asked"),
    [
        ("mpirun (Open MPI) 5.0.11", "-n 2 -x UNISONO_SECRET -x OMP_NUM_THREADS --bind-to none python train.py"),
        ("HYDRA build details:", "-n 2 python train.py"),
    ],
)
def test_mpirun_options_match_the_implementation(start: Start, folder: Path, says: str, asked: str) -> None:
    program(folder, "mpirun", MPIRUN)
    (folder / "mpirun.sh").write_text(FILES["mpirun.sh"])
    finish(start(["bash", "mpirun.sh"], env(folder, SAYS=says), folder))
    assert (folder / "asked").read_text().strip() == asked
