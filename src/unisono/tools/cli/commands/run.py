"""Start the ranks of a script on this host, or on each of several hosts.

Each line of output begins with its rank. If a rank fails, the others are ended, and the first error is printed. The
script finds its rank by unisono.init(), or by torchrun's variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. SIGTERM, SIGHUP, SIGINT, SIGUSR1 and SIGUSR2 reach the ranks' handlers; after the first three, ranks have
--grace seconds to save and leave.

  unisono run -n 4 train.py --epochs 3
  unisono run -n 4 -m package.train --epochs 3
  unisono run -n 8 --hosts 10.1.1.20,10.1.1.21 train.py     (the same on each of the hosts)
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from unisono.launcher.script import ScriptJob, run_script
from unisono.tools.cli import UsageError
from unisono.tools.doctor.network import addresses, is_own

__all__ = ["add_arguments", "run"]

_PORT = 29500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, the script, and its own arguments."""
    parser.epilog = (
        "exit status: 0 ok (with --on-failure continue, if any rank ends well), 2 usage error, else that of the rank "
        "that failed first (128 + a signal's number)"
    )
    add = parser.add_argument
    add("-n", "--ranks", type=int, required=True, metavar="N", help="how many ranks to start on this host")
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("--backend", help="the backend of unisono.init() where the script passes none")
    add("--restarts", type=int, default=0, metavar="R", help="start all ranks again after a failure, R times at most")
    add(
        "--on-failure",
        choices=("end", "continue"),
        default="end",
        help="what the other ranks do after a failure (default end)",
    )
    add("--hosts", default="", metavar="A,B", help="names or addresses; run the same command on each of them")
    add("--host", type=int, metavar="I", help="index of this host in --hosts, from 0 (found by its addresses)")
    add(
        "--port",
        type=int,
        metavar="P",
        help=f"where rank 0 listens, and torch at the next port (free ports; {_PORT} with --hosts)",
    )
    add(
        "--bind-to",
        choices=("none", "numa", "core"),
        default="none",
        help="processors of a rank: all, those of its NUMA node, or an equal share of these (default none)",
    )
    add("--grace", type=float, default=30.0, metavar="S", help="seconds to save and leave after a signal (default 30)")
    add("--stdin", type=int, metavar="R", help="rank of this host that reads standard input (0 with -n 1, else none)")
    add(
        "--start",
        choices=("auto", "fork", "plain"),
        default="auto",
        help="fork ranks from one process that has imported torch (auto: if there are more ranks than cores), or start "
        "a Python for each",
    )
    add("--no-prefix", action="store_true", help="pass output on without the rank")
    add(
        "--json",
        action="store_true",
        help="print the exit status of each rank as JSON at the end, and what the ranks print to standard error",
    )
    add("script", help="a file, or a module with -m")
    add("arguments", nargs=argparse.REMAINDER, default=[], help="arguments of the script").required = False


def run(given: argparse.Namespace) -> int:
    """Run the script, and return its exit status."""
    if given.ranks < 1:
        raise UsageError(f"-n must be at least 1, not {given.ranks}")
    if given.restarts < 0:
        raise UsageError(f"--restarts must be at least 0, not {given.restarts}")
    if given.port is not None and not 0 < given.port < 65535:
        raise UsageError(f"--port must be from 1 to 65534, not {given.port}")
    if given.bind_to != "none" and not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"--bind-to {given.bind_to} needs Linux")
    if given.grace < 0:
        raise UsageError(f"--grace must be at least 0, not {given.grace:g}")
    if given.stdin is not None and not 0 <= given.stdin < given.ranks:
        raise UsageError(f"--stdin must be from 0 to {given.ranks - 1}, not {given.stdin}")
    script = Path(given.script)
    if not given.module and not (script / "__main__.py" if script.is_dir() else script).is_file():
        raise UsageError(f"there is no file {given.script!r}; pass -m to run a module")
    hosts = [host.strip() for host in given.hosts.split(",") if host.strip()]
    command = [*(["-m"] if given.module else []), given.script, *given.arguments]
    job = ScriptJob(
        command,
        given.ranks,
        host=_index(hosts, given.host) if hosts else 0,
        hosts=max(1, len(hosts)),
        address=hosts[0] if hosts else "127.0.0.1",
        port=given.port or (_PORT if hosts else None),
        backend=given.backend,
        binding=given.bind_to,
        prefix=not given.no_prefix,
        to_stderr=given.json,
        grace_s=given.grace,
        stdin=0 if given.stdin is None and given.ranks == 1 and len(hosts) <= 1 else given.stdin,
        start=given.start,
    )
    if given.start == "fork" and (reason := job.why_plain()):
        raise UsageError(f"--start fork cannot fork these ranks: {reason}")
    result = run_script(job, given.restarts, given.on_failure)
    if given.json:
        print(json.dumps(asdict(result), indent=2))
    return result.status


def _index(hosts: list[str], given: int | None) -> int:
    """Return which of the hosts this one is."""
    if given is not None:
        if not 0 <= given < len(hosts):
            raise UsageError(f"--host {given} is not in 0 to {len(hosts) - 1}, the indices of --hosts")
        return given
    own = [index for index, host in enumerate(hosts) if any(map(is_own, addresses(host)))]
    if len(own) != 1:
        raise UsageError(f"{len(own)} of --hosts are addresses of this host; pass --host I, the index of this host")
    return own[0]
