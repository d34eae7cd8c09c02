"""Write an HTML page that animates an algorithm, or a run that un.trace recorded.

The page is a single file that works offline. The page shows at most 32 ranks.

  unisono play all_reduce ring --ranks 8 -o ring.html
  unisono play --trace run.json -o run.html
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from unisono.collectives.algorithms import ALGORITHMS, find
from unisono.lab.player.from_algorithm import replay_algorithm
from unisono.lab.player.from_trace import replay_trace
from unisono.lab.player.replay import Replay, write
from unisono.tools.cli import UsageError, numbers, refusing

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the algorithm or the trace, and the file to write."""
    add = parser.add_argument
    add("collective", nargs="?", help=f"collective: {', '.join(ALGORITHMS)}")
    add("algorithm", nargs="?", help="algorithm of this collective, such as ring; lists them if left out")
    add("-n", "--ranks", type=int, default=4, help="number of ranks (%(default)s)")
    add("--size", default="1M", help="bytes of the message that is cut into chunks, such as 64K (%(default)s)")
    add("--option", action="append", default=[], metavar="NAME=NUMBER", help="option of the algorithm")
    add("--trace", type=Path, metavar="FILE", help="replay this file of un.trace instead of an algorithm")
    add("--json", action="store_true", help="print the path as JSON")
    add("-o", "--output", type=Path, required=True, help="HTML file to write; an existing one is replaced")


def run(given: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    try:
        with refusing(ValueError):
            write(_recorded(given) if given.trace else _algorithm(given), given.output)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    print(json.dumps({"output": str(given.output)}) if given.json else given.output)
    return 0


def _recorded(given: argparse.Namespace) -> Replay:
    if given.collective:
        raise UsageError("pass an algorithm or --trace, not both")
    try:
        document = json.loads(given.trace.read_text())
    except ValueError as error:
        raise UsageError(f"{given.trace} is not JSON ({error}); pass a file of un.trace") from error
    return replay_trace(document)


def _algorithm(given: argparse.Namespace) -> Replay:
    if given.collective is None:
        raise UsageError("pass a collective and its algorithm, such as all_reduce ring; or --trace FILE")
    if given.algorithm is None:
        known = ALGORITHMS[given.collective].names() if given.collective in ALGORITHMS else []
        listed = f"algorithms of {given.collective}: {', '.join(known)}" if known else f"known: {', '.join(ALGORITHMS)}"
        raise UsageError(f"pass a collective and its algorithm; {listed}")
    from unisono.tools.bench.settings import parse_sizes

    nbytes, *more = parse_sizes(given.size)
    if more:
        raise UsageError(f"pass one size, such as 64K, not {given.size!r}")
    algorithm = find(given.collective, given.algorithm, **numbers(given.option))
    return replay_algorithm(algorithm, given.ranks, nbytes)
