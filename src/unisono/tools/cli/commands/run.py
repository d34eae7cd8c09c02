"""Start the ranks of a script on this host, or on each of several hosts.

Each line of output begins with the number of the rank that printed it. If a rank fails, the other ranks are terminated,
and the first error is printed. The script gets its rank from unisono.init(), or from the variables that torchrun also
sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. SIGTERM, SIGHUP, SIGINT, SIGUSR1 and SIGUSR2 are
forwarded to the ranks. After SIGTERM, SIGHUP or SIGINT, ranks have --grace seconds to save a checkpoint and exit.

  unisono run -n 4 train.py --epochs 3
  unisono run -n 4 -m package.train --epochs 3
  unisono run --hosts 10.1.1.20,10.1.1.21:4 -n 8 train.py     (8 ranks on the first, 4 on the second, by ssh)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path

from unisono.host.network import is_loopback, means_here
from unisono.launcher.remote_host import Shell
from unisono.launcher.script import run_script
from unisono.launcher.script_job import ScriptJob
from unisono.tools.cli import UsageError

__all__ = ["add_arguments", "run"]

_PORT = 29500
_SSH = "ssh -x -T -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax="
_SSH_S = 300.0
"""Seconds after which ssh considers an unresponsive host lost, if no --heartbeat is passed."""
_HOST = re.compile(r"(\[(?P<address>[^\]]+)\]|(?P<name>[^:\[\]]+|[^\[\]]*:[^\[\]]*:[^\[\]]*))(:(?P<ranks>[1-9]\d*))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, the script, and the script's arguments."""
    parser.epilog = (
        "exit status: 0 ok (with --on-failure continue, if any rank ends well), 2 usage error, else that of the rank "
        "that failed first (128 + a signal's number)"
    )
    add = parser.add_argument
    add("-n", "--ranks", type=int, metavar="N", help="how many ranks to start on each host (default 1, with --hosts)")
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("--backend", help="the backend of unisono.init() where the script passes none")
    add(
        "--heartbeat",
        type=float,
        metavar="S",
        help="seconds after which a host that answers no more is lost, for ssh (default 300), and for unisono.init() "
        "where the script passes none",
    )
    add("--restarts", type=int, default=0, metavar="R", help="start all ranks again after a failure, R times at most")
    add(
        "--on-failure",
        choices=("end", "continue"),
        default="end",
        help="what the other ranks do after a failure (default end)",
    )
    add(
        "--hosts",
        default="",
        metavar="A,B:N",
        help="names or addresses, by which the hosts reach each other, and numbers of ranks; started by ssh",
    )
    add(
        "--host",
        metavar="I",
        help="start only the ranks of one of --hosts, this one: its index from 0, or 'own' to find it by its addresses "
        "(run the same command on each of them)",
    )
    add("--ssh", metavar="CMD", help=f"the command that runs another one on a host (default '{_SSH}60')")
    add("--python", default=sys.executable, metavar="P", help="Python on the other hosts (default: the path of this)")
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
    hosts = _hosts(given)
    _check(given, hosts)
    script = Path(given.script)
    if not given.module and not (script / "__main__.py" if script.is_dir() else script).is_file():
        raise UsageError(f"there is no file {given.script!r}; pass -m to run a module")
    jobs = _jobs(given, hosts)
    shells = {}
    if _by_ssh(given):
        words = shlex.split(given.ssh or f"{_SSH}{max(1, int((given.heartbeat or _SSH_S) / 5))}")
        shells = {
            index: Shell(name, [*words, name], given.python)
            for index, (name, _) in enumerate(hosts)
            if not means_here(_address(name))
        }
        secret = os.environ.get("UNISONO_SECRET") or secrets.token_hex(32)
        jobs = [replace(job, secret=secret) for job in jobs]
    elif given.hosts:
        jobs = [jobs[_index(hosts, given.host)]]
    if given.start == "fork" and (reason := jobs[0].fork_obstacle()):
        raise UsageError(f"--start fork cannot fork these ranks: {reason}")
    result = run_script(jobs, given.restarts, given.on_failure, shells)
    if given.json:
        print(json.dumps(asdict(result), indent=2))
    return result.status


def _check(given: argparse.Namespace, hosts: list[tuple[str, int]]) -> None:
    """Raise `UsageError` for options that are invalid or contradict each other."""
    if given.ranks is None and not given.hosts:
        raise UsageError("pass -n, the number of ranks, or --hosts")
    if given.ranks is not None and given.ranks < 1:
        raise UsageError(f"-n must be at least 1, not {given.ranks}")
    if given.port is not None and not 0 < given.port < 65535:
        raise UsageError(f"--port must be from 1 to 65534, not {given.port}")
    if given.bind_to != "none" and not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"--bind-to {given.bind_to} needs Linux")
    for name, least in (("restarts", 0), ("grace", 0), ("heartbeat", 2)):
        value = getattr(given, name)
        if value is not None and not value >= least:
            raise UsageError(f"--{name} must be at least {least}, not {value:g}")
    if given.stdin is not None:
        if _by_ssh(given):
            raise UsageError("--stdin needs ranks of this host, without --hosts or with --host")
        if not 0 <= given.stdin < hosts[0][1]:
            raise UsageError(f"--stdin must be from 0 to {hosts[0][1] - 1}, not {given.stdin}")


def _by_ssh(given: argparse.Namespace) -> bool:
    return bool(given.hosts) and given.host is None


def _hosts(given: argparse.Namespace) -> list[tuple[str, int]]:
    """Return each host's name and number of ranks."""
    count = given.ranks or 1
    if not given.hosts:
        return [("127.0.0.1", count)]
    found = []
    for text in filter(None, map(str.strip, given.hosts.split(","))):
        # An IPv6 address contains colons, so a number of ranks can follow it only if the address is in brackets.
        match = _HOST.fullmatch(text)
        if match is None:
            raise UsageError(f"--hosts takes names or addresses, such as a,b:4 or [fd77::1]:4, not {text!r}")
        found.append((match["name"] or match["address"], int(match["ranks"] or count)))
    if not found:
        raise UsageError(f"--hosts {given.hosts!r} names no host")
    if len(found) > 1 and (_address(found[0][0]) == "localhost" or is_loopback(_address(found[0][0]))):
        raise UsageError(f"the first of --hosts must be an address that the others can reach, not {found[0][0]}")
    return found


def _jobs(given: argparse.Namespace, hosts: list[tuple[str, int]]) -> list[ScriptJob]:
    counts = [count for _, count in hosts]
    alone = given.ranks == 1 and len(hosts) == 1 and not _by_ssh(given)
    return [
        ScriptJob(
            [*(["-m"] if given.module else []), given.script, *given.arguments],
            count,
            host=index,
            before=sum(counts[:index]),
            size=sum(counts),
            address=_address(hosts[0][0]),
            port=given.port or (_PORT if given.hosts else None),
            backend=given.backend,
            heartbeat_s=given.heartbeat,
            binding=given.bind_to,
            prefix=not given.no_prefix,
            to_stderr=given.json,
            grace_s=given.grace,
            stdin=0 if given.stdin is None and alone else given.stdin,
            start=given.start,
        )
        for index, count in enumerate(counts)
    ]


def _address(host: str) -> str:
    """Return the address in USER@ADDRESS."""
    return host.rpartition("@")[2]


def _index(hosts: list[tuple[str, int]], given: str) -> int:
    """Return the index of this host in `hosts`."""
    if given != "own":
        if not given.isdecimal() or int(given) >= len(hosts):
            raise UsageError(f"--host {given} is not in 0 to {len(hosts) - 1}, the indices of --hosts")
        return int(given)
    own = [index for index, (name, _) in enumerate(hosts) if means_here(_address(name))]
    if len(own) != 1:
        raise UsageError(f"{len(own)} of --hosts are addresses of this host; pass --host I, the index of this host")
    return own[0]
