"""Show the current call, line and stack of every rank of a running job."""

from __future__ import annotations

import argparse
from typing import Any

from unisono.control.client import SocketControl
from unisono.control.inspect_socket import find_control
from unisono.diagnostics.hang_report import lines_of

__all__ = ["add_arguments", "run"]

_REACH_WITHIN_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the job to query."""
    parser.add_argument("pid", type=int, help="pid of a process of the job: any rank, or the launching process")
    parser.add_argument("--patience", type=float, default=0.5, help="seconds to wait for a rank's answer (%(default)s)")
    parser.add_argument("--stacks", action="store_true", help="print the whole stack of each rank")


def run(given: argparse.Namespace) -> int:
    """Query the control-plane threads of all ranks, and print their answers."""
    address, secret = find_control(given.pid)
    control = SocketControl(address, secret, _REACH_WITHIN_S)
    try:
        found = control.query(None, given.patience)
    finally:
        control.close()
    print(f"{len(found)} ranks at the control plane {address[0]}:{address[1]}")
    for (group, rank), report in sorted(found.items()):
        process = "" if report is None else f" (process {report['pid']})"
        print(*lines_of(f"rank {rank} of {group}{process}", report), sep="\n")
        if report is not None:
            print(*_more(report, given.stacks), sep="\n")
    return 0


def _more(report: dict[str, Any], stacks: bool) -> list[str]:
    called = [entry for entry in report["groups"] if entry["last"]]
    lines = [f"    its last calls in {entry['group']}: {', then '.join(entry['last'])}" for entry in called]
    return lines + ([f"      {line}" for line in report["stack"]] if stacks else [])
