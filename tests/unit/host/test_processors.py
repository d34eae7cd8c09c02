"""Number of processors for all ranks together, in containers and under launchers that bind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono.host import processors as counting
from unisono.host.processors import cores
from unisono.launcher.processes import share_of_cores


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One of 64 processors, of which this process may run on 16; a folder for what its control group says."""
    for name in ("RANK", "SLURM_PROCID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(counting, "_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(counting, "_V2", tmp_path)
    monkeypatch.setattr(counting, "_V1", tmp_path / "cpu")
    return tmp_path


def test_cpu_affinity_is_respected() -> None:
    assert cores() == 16
    assert share_of_cores(None, 3) == 5


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, 64),
        ({"SLURM_STEP_ID": "0"}, 64),
        # What sbatch runs has all that the job has here.
        ({"SLURM_PROCID": "0"}, 16),
        # srun started torchrun, whose workers share what it got.
        ({"SLURM_STEP_ID": "0", "RANK": "3"}, 16),
    ],
)
def test_binding_by_a_launcher_is_ignored(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cores() == found


@pytest.mark.parametrize(
    ("said", "found"),
    [("max 100000\n", 16), ("200000 100000\n", 2), ("50000 100000\n", 1), ("9900000 100000\n", 16), ("what?\n", 16)],
)
def test_cgroup_limit_is_respected(machine: Path, said: str, found: int) -> None:
    (machine / "cpu.max").write_text(said)
    assert cores() == found


def test_smallest_limit_of_parent_cgroups_counts(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/job/step\n")
    (machine / "job" / "step").mkdir(parents=True)
    for group, said in (("", "900000 100000"), ("job", "300000 100000"), ("job/step", "max 100000")):
        (machine / group / "cpu.max").write_text(said + "\n")
    assert cores() == 3


@pytest.mark.parametrize(("quota", "found"), [("-1", 16), ("300000", 3)])
def test_cgroup_v1_is_supported(machine: Path, quota: str, found: int) -> None:
    (machine / "cgroup").write_text("9:memory:/other\n4:cpu,cpuacct:/job\n")
    (machine / "cpu" / "job").mkdir(parents=True)
    (machine / "cpu" / "job" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (machine / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores() == found
