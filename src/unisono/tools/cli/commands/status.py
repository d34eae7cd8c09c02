"""Show what each rank of this user's running jobs is doing: its current call, source line and stack.

Ranks are found no matter which launcher started them, except ranks that are threads of one process.

  unisono status
  unisono status 12345 --stacks      (the job of process 12345: a rank, or the ranks' launcher)
  unisono status --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.control.client import SocketControl
from unisono.control.inspect_socket import find_control, find_jobs
from unisono.diagnostics.hang_report import lines_of
from unisono.errors import CommError
from unisono.tools.cli import UsageError

__all__ = ["add_arguments", "run"]

_REACH_WITHIN_S = 5.0
_COMMAND_WIDTH = 80


@dataclass(frozen=True, slots=True)
class _RunningJob:
    address: tuple[str, int]
    processes: list[int]
    ranks: dict[tuple[str, int], dict[str, Any] | None]

    @property
    def title(self) -> str:
        where = f"control plane {self.address[0]}:{self.address[1]}"
        return f"{_command(self.processes[0]) or 'a job'}: {len(self.ranks)} ranks at the {where}"

    def to_dict(self) -> dict[str, Any]:
        ranks = [
            {"group": group, "rank": rank, "report": report} for (group, rank), report in sorted(self.ranks.items())
        ]
        return {"control": list(self.address), "title": self.title, "processes": self.processes, "ranks": ranks}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the job to query, the timeout and the format."""
    parser.add_argument("pid", type=int, nargs="?", help="a process of one job, or its launcher (default: all jobs)")
    parser.add_argument(
        "--timeout", type=float, default=0.5, metavar="S", help="seconds to wait for a rank's answer (%(default)s)"
    )
    parser.add_argument("--stacks", action="store_true", help="print the whole stack of each rank")
    parser.add_argument("--json", action="store_true", help="print the jobs as JSON")


def run(given: argparse.Namespace) -> int:
    """Query all ranks' control-plane threads, and print the ranks' reports."""
    if not given.timeout > 0:
        raise UsageError(f"--timeout must be a positive number of seconds, not {given.timeout}")
    if given.pid is None:
        jobs = []
        for control, processes in find_jobs().items():
            # Skip a job that ends while it is queried.
            with contextlib.suppress(CommError):
                jobs.append(_query(*control, processes, given.timeout))
    else:
        control = find_control(given.pid)
        jobs = [_query(*control, find_jobs().get(control, [given.pid]), given.timeout)]
    if given.json:
        print(json.dumps([job.to_dict() for job in jobs], indent=2))
    elif jobs:
        print("\n\n".join("\n".join(_lines(job, given.pid is not None, given.stacks)) for job in jobs))
    else:
        print("this user runs no job on this host (ranks that are threads of one process cannot be queried)")
    return 0


def _query(address: tuple[str, int], secret: bytes, processes: list[int], timeout: float) -> _RunningJob:
    with contextlib.closing(SocketControl(address, secret, _REACH_WITHIN_S)) as control:
        return _RunningJob(address, processes, control.query(None, timeout))


def _lines(job: _RunningJob, at_length: bool, stacks: bool) -> list[str]:
    lines = [job.title]
    for (group, rank), report in sorted(job.ranks.items()):
        process = "" if report is None else f" (process {report['pid']})"
        about = lines_of(f"rank {rank} of {group}{process}", report)
        lines += about if at_length else about[:1]
        if report is not None and at_length:
            called = [entry for entry in report.get("groups", ()) if entry["last"]]
            lines += [f"    its last calls in {entry['group']}: {', then '.join(entry['last'])}" for entry in called]
        if report is not None and stacks:
            lines += [f"      {line}" for line in report["stack"]]
    return lines


def _command(pid: int) -> str:
    """Return a process's command line, starting at its script."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    script = next((index for index, word in enumerate(words) if word.endswith(".py")), 0)
    text = " ".join(words[script:]).strip()
    return text if len(text) <= _COMMAND_WIDTH else f"{text[:_COMMAND_WIDTH]}..."
