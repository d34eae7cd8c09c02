"""Measure the cost of messages between ranks on this host, and store the result for `algorithm="auto"`.

The command prints the fitted constants, and the all_reduce algorithm that they select for each size.

  unisono tune -n 4 --backend gloo
  unisono tune -n 8 --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import unisono as un
from unisono.errors import UnavailableError
from unisono.tools.cli import refusing

__all__ = ["add_arguments", "run"]

_SIZES = [8 << shift for shift in range(0, 24, 3)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the number of ranks, the backend and the format."""
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=2, help="number of ranks, one thread each (%(default)s)")
    add("--backend", default="auto", help="unisono's backend: shm, gloo, thread; auto is shm where it works")
    add("--seconds", type=float, default=2.0, help="time for the measurement (%(default)s)")
    add("--json", action="store_true", help="print the table as JSON")


def run(given: argparse.Namespace) -> int:
    """Measure the costs, and store and print them."""
    from unisono.tools.bench import on_ranks, shown_size
    from unisono.tools.bench.settings import Settings

    with refusing(ValueError, UnavailableError):
        backend = Settings(backend=given.backend, ranks=given.ranks, seconds=given.seconds).chosen_backend
        table, plans = on_ranks(_rank, given.ranks, backend, (given.seconds,))[0]
    if given.json:
        print(table)
        return 0
    found = json.loads(table)
    inside = found["inside"]
    print(
        f"{backend}, {given.ranks} ranks, table {found['hash']}: alpha {inside['alpha'] * 1e6:.1f} us, beta "
        f"{inside['beta'] * 1e9:.3f} ns/B, gamma {found['gamma'] * 1e9:.3f} ns/B, overhead "
        f"{found['overhead'] * 1e6:.1f} us a message"
    )
    print(f"\n{'all_reduce of':>14}  {'algorithm':<30} {'predicted':>12}")
    for nbytes, algorithm, seconds in plans:
        print(f"{shown_size(nbytes):>14}  {algorithm:<30} {seconds * 1e6:>9.1f} us")
    return 0


def _rank(comm: un.Communicator, seconds: float, _folder: Path) -> tuple[str, list[tuple[int, str, float]]]:
    table: Any = comm.tune(seconds)
    plans = [(nbytes, comm.plan("all_reduce", nbytes)) for nbytes in _SIZES]
    return table.to_json(), [(nbytes, plan.algorithm, plan.predicted_s) for nbytes, plan in plans]
