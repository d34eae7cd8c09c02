"""What the questions about shared memory have in common: their options, and runs that print as they go."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from unisono.bench import Finding, Row, Settings, parse_sizes, run, summary

__all__ = ["Findings", "between", "judged", "measured", "options"]

Findings = list[Finding]


def options(description: str | None) -> argparse.Namespace:
    """The command line: how long, how large, and with which caches."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each size, about (%(default)s)")
    parser.add_argument("--most", default="100M", help="leave out larger messages (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="leave out other numbers of ranks")
    parser.add_argument("--caches", nargs="+", choices=("warm", "cold"), default=["warm", "cold"])
    return parser.parse_args()


def measured(given: argparse.Namespace, sizes: str, **settings: object) -> list[Row]:
    """The rows of those sizes that are wanted; the table is printed. Ends the program if a result is wrong."""
    most = parse_sizes(given.most)[0]
    wanted = tuple(size for size in parse_sizes(sizes) if size <= most)
    if not wanted:
        return []
    rows = run(Settings(sizes=wanted, seconds=given.seconds, **settings), shown=True)  # type: ignore[arg-type]
    said = summary(rows)
    print(said, flush=True)
    if any(row.wrong for row in rows):
        raise SystemExit(said)
    return rows


def between(rows: list[Row], first: str, last: str) -> list[Row]:
    """The rows of sizes from `first` to `last`."""
    (low,), (high,) = parse_sizes(first), parse_sizes(last)
    return [row for row in rows if low <= row.nbytes <= high]


def judged(judge: Callable[..., Finding], what: str, rows: list[Row], peer: str, bound: float) -> Findings:
    """The finding about these rows; none if there are no rows."""
    return [judge(what, rows, peer, bound)] if rows else []
