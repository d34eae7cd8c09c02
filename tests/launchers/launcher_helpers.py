"""Helpers for tests of launchers: a simulated Slurm, a light stand-in for torch, and results of programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "launchers" / "train.py"

# What a batch script of four tasks on four nodes sees, as slurmstepd sets it: a rank, but no step.
BATCH = {
    "SLURM_JOB_ID": "200505",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_TASK_PID": "16360",
    "SLURM_JOB_NAME": "bash",
    "SLURM_NODELIST": "gnode[10,20,25,37]",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
}

# Forked ranks get torch from the process that forks them, whose import takes nearly all of the start. A test that asks
# only how ranks are forked, run and ended gives that process this instead.
LIGHT = """
import importlib.machinery, importlib.util, sys, types
if "unisono.launcher.template" in sys.orig_argv:
    for name in ("torch", "unisono.launcher.preload", "unisono.launcher.processes"):
        sys.modules[name] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
    sys.modules["torch"].cuda = types.SimpleNamespace(is_initialized=lambda: False)
    sys.modules["unisono.launcher.processes"].reseed_generators = lambda: None
"""


def started_with(folder: Path, text: str) -> dict[str, str]:
    """Return variables by which every Python runs a text before anything else."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def task(rank: int, size: int, **more: str) -> dict[str, str]:
    """Return the environment of one task of a step on one node."""
    return {
        **BATCH,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": "gnode10",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        **more,
    }


def finish(process: subprocess.Popen[str], timeout_s: float = 300.0) -> str:
    """Return the output of a program after it has succeeded."""
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
    return out


def expect(condition: Callable[[], object], what: str, within_s: float = 100.0) -> None:
    """Wait for a condition, and fail if it does not hold in time."""
    assert wait_until(condition, within_s), f"waited {within_s} s for this: {what}"


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
