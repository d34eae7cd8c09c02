"""Examine this host: which transports work, what prevents ranks from running, and how to fix it.

The exit status is 1 if there is a problem; findings marked as "optional" are not problems. You can
paste the output into an issue. With --hosts, start the command on each host, with the same list; the
hosts then run a collective together.

  unisono doctor
  unisono doctor torch all_reduce --backend gloo
  torchrun --nproc-per-node 4 -m unisono doctor
  unisono doctor --hosts 10.1.1.20,10.1.1.21      (on each of them)
"""

from __future__ import annotations

import argparse
import json
import sys

from unisono.tools.cli import UsageError
from unisono.tools.doctor import CHECKS, PORT, Finding, Target, examine
from unisono.tools.doctor.checks.launcher import launched
from unisono.tools.doctor.examination import as_json, facts, lines, marks

__all__ = ["add_arguments", "run"]

_WIDTH = 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; see `unisono.tools.doctor.Target`."""
    add = parser.add_argument
    add("checks", nargs="*", metavar="CHECK", help=f"checks to run (all if left out):  {', '.join(CHECKS.names())}")
    add("--backend", help="backend that your program passes to un.init, such as mpi; only its needs are checked")
    add("-n", "--ranks", type=int, metavar="N", help="number of ranks on this host (default: the launcher's)")
    add("--hosts", default="", metavar="A,B", help="host names or addresses; run the same command on each host")
    add("--host", type=int, metavar="I", help="index of this host in --hosts, from 0 (default: found by its addresses)")
    add("--port", type=int, default=PORT, help="port of the first host for the rendezvous (%(default)s)")
    add("--timeout", type=float, default=60.0, metavar="S", help="timeout of all checks, in seconds (%(default)s)")
    add("--json", action="store_true", help="print the findings as JSON")


def run(given: argparse.Namespace) -> int:
    """Examine this host, and print the findings. Return 1 if there is a problem."""
    target = _target(given)
    local_rank = launched().local_rank
    if local_rank:
        # A launcher has started this command once per rank; only local rank 0 examines the host.
        return 0
    names = given.checks or None
    signs = marks(sys.stdout.encoding)
    found: list[tuple[str, list[Finding]]] = []
    if target.hosts:
        print(f"Run this on each of {', '.join(target.hosts)} at the same time.", file=sys.stderr, flush=True)
    for name, findings in examine(target, names):
        found.append((name, findings))
        if not given.json:
            print("\n".join(lines(name, findings, signs)), end="\n" if findings else "", flush=True)
    problems = sum(finding.state == "problem" for _, findings in found for finding in findings)
    if given.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        known = "\n".join(f"  {name:{_WIDTH}} {text}" for name, text in facts().items())
        print(f"\n{known}\n\n{problems or 'No'} {'problem' if problems == 1 else 'problems'} found.")
    return 1 if problems else 0


def _target(given: argparse.Namespace) -> Target:
    hosts = tuple(host.strip() for host in given.hosts.split(",") if host.strip())
    unknown = [name for name in given.checks if name not in CHECKS]
    if unknown:
        raise UsageError(f"unknown check {unknown[0]!r}; known: {', '.join(CHECKS.names())}")
    backends = _backends()
    unknown = [name for name in (given.backend or "auto").split("+") if backends and name not in backends]
    if unknown:
        raise UsageError(
            f"unknown backend {unknown[0]!r}; known: {', '.join(backends)}, and two of them as in shm+gloo"
        )
    if given.hosts and len(hosts) < 2:
        raise UsageError("--hosts needs two or more hosts, separated by commas: --hosts 10.1.1.20,10.1.1.21")
    if given.host is not None and not hosts:
        raise UsageError(
            "--host is the index of this host in --hosts: pass --hosts too (the number of ranks is --ranks)"
        )
    if given.host is not None and not 0 <= given.host < len(hosts):
        raise UsageError(f"--host must be from 0 to {len(hosts) - 1}, an index of --hosts, not {given.host}")
    if given.ranks is not None and given.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, not {given.ranks}")
    if not 0 < given.port < 65536:
        raise UsageError(f"--port must be from 1 to 65535, not {given.port}")
    if not given.timeout > 0:
        raise UsageError(f"--timeout must be a positive number of seconds, not {given.timeout}")
    return Target(given.backend, given.ranks, hosts, given.host, given.port, given.timeout)


def _backends() -> list[str]:
    """Return the backends that `init` accepts, or none if torch is broken, so that the examination continues."""
    try:
        from unisono.transports import TRANSPORTS
    except (ImportError, OSError):
        return []
    return ["auto", *TRANSPORTS.names()]
