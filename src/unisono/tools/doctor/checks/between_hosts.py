"""Check that the hosts in `--hosts` can reach each other and compute a correct all_reduce."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from unisono.host.network import is_loopback, means_here
from unisono.tools.doctor.examination import Finding, Target, problem
from unisono.tools.doctor.network import addresses, own_addresses
from unisono.tools.doctor.smoke_test_runner import tried

__all__ = ["ORDER", "check"]

ORDER = 80


def check(target: Target) -> Iterator[Finding]:
    """Run one rank per host. The user must run the same command on each host at the same time."""
    if not target.hosts:
        return
    found = {host: addresses(host) for host in target.hosts}
    unknown = [host for host, places in found.items() if not places]
    if unknown:
        yield problem(f"{unknown[0]} has no address here", f"getent hosts {unknown[0]}   # or pass its address")
        return
    rank = _own_number(target)
    if isinstance(rank, Finding):
        yield rank
        return
    inward = [host for host, places in found.items() if all(map(is_loopback, places))]
    if inward and len(inward) < len(found):
        yield problem(
            f"{inward[0]} is the loopback, {found[inward[0]][0]}, here: the other hosts cannot reach it there",
            f"unisono doctor --hosts {','.join(target.hosts)}   # with addresses instead of names",
        )
        return
    first = target.hosts[0]
    others = " and ".join(host for number, host in enumerate(target.hosts) if number != rank)
    fix = (
        f"unisono doctor --hosts {','.join(target.hosts)}   # on {others} at the same time, with the same "
        f"UNISONO_SECRET; open port {target.port} of {first} (or --port), and ports from 1024 on between all hosts"
    )
    host = f"[{first}]" if ":" in first else first
    options = ["--meet", f"tcp://{host}:{target.port}", "--rank", str(rank), "--size", str(len(target.hosts))]
    for finding in tried({"gloo": fix}, target.limit_s, options):
        yield replace(finding, text=f"this is host {rank} of {len(target.hosts)}; {finding.text}")


def _own_number(target: Target) -> int | Finding:
    if target.rank is not None:
        return target.rank
    own = [rank for rank, host in enumerate(target.hosts) if means_here(host)]
    if len(own) == 1:
        return own[0]
    command = f"unisono doctor --hosts {','.join(target.hosts)} --host 0   # and 1, ... on the others"
    if own:
        return problem(f"{' and '.join(target.hosts[rank] for rank in own)} are all addresses of this host", command)
    here = ", ".join(own_addresses())
    return problem(f"none of {', '.join(target.hosts)} is an address of this host, which has {here}", command)
