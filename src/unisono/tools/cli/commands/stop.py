"""Ask all ranks of a running job to stop at the same training step, if the program calls `comm.stop_requested`.

If the program never calls `comm.stop_requested`, its ranks continue.

  unisono stop 12345                               (the job of process 12345: a rank, or the ranks' launcher)
  unisono stop 12345 --reason 'the node is needed'
  unisono stop 12345 --json
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing

from unisono.control.client import SocketControl
from unisono.control.inspect_socket import find_control
from unisono.errors import CommError

__all__ = ["add_arguments", "run"]

_REACH_WITHIN_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the job, and the reason."""
    parser.add_argument("pid", type=int, help="a process of the job, or its launcher")
    parser.add_argument("--reason", default="unisono stop", help="what comm.stop_reason is on every rank (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the control plane and the number of ranks as JSON")


def run(given: argparse.Namespace) -> int:
    """Send the request to the job's control plane."""
    address, secret = find_control(given.pid)
    with closing(SocketControl(address, secret, _REACH_WITHIN_S)) as control:
        ranks = control.request_stop(None, given.reason)
    if not ranks:
        raise CommError(
            f"the job of process {given.pid} has no ranks to stop: they have not joined yet, or have left. Nothing was "
            "requested"
        )
    where = json.dumps({"control": list(address), "ranks": ranks, "reason": given.reason})
    print(
        where
        if given.json
        else f"asked {ranks} rank{'s' * (ranks > 1)} at the control plane {address[0]}:{address[1]} to stop"
    )
    return 0
