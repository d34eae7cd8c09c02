"""How many processors ranks have between them, in containers and under launchers that bind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono import cores as counting
from unisono.cores import cores
from unisono.launching.processes import share_of_cores


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One of 64 processors, of which this process may run on 16; a folder for what its control group says."""
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(counting, "_V2", tmp_path / "cpu.max")
    monkeypatch.setattr(counting, "_V1", (tmp_path / "quota", tmp_path / "period"))
    return tmp_path


def test_only_those_count_that_the_process_may_run_on() -> None:
    assert cores() == 16
    assert share_of_cores(None, 3) == 5


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, 64),
        ({"SLURM_PROCID": "0"}, 64),
        # srun started torchrun, whose workers share what it got.
        ({"SLURM_PROCID": "0", "RANK": "3"}, 16),
    ],
)
def test_what_a_launcher_bound_a_rank_to_does_not_count(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cores() == found


@pytest.mark.parametrize(
    ("said", "found"),
    [("max 100000\n", 16), ("200000 100000\n", 2), ("50000 100000\n", 1), ("9900000 100000\n", 16), ("what?\n", 16)],
)
def test_a_control_group_may_allow_less(machine: Path, said: str, found: int) -> None:
    (machine / "cpu.max").write_text(said)
    assert cores() == found


@pytest.mark.parametrize(("quota", "found"), [("-1", 16), ("300000", 3)])
def test_older_control_groups_are_known(machine: Path, quota: str, found: int) -> None:
    (machine / "quota").write_text(quota + "\n")
    (machine / "period").write_text("100000\n")
    assert cores() == found
