"""Shared options and tables of the programs in `benchmarks/`."""

from __future__ import annotations

import argparse
from typing import Any

from unisono.tools.bench.ranks import run
from unisono.tools.bench.result import Result, summary
from unisono.tools.bench.settings import Settings, parse_sizes

__all__ = ["between", "measured", "parser", "sweep_parser"]


def parser(description: str | None, seconds: float | None = None) -> argparse.ArgumentParser:
    """Return the parser of a program, with its docstring as help, and with `--seconds` where it has a default."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if seconds is not None:
        made.add_argument("--seconds", type=float, default=seconds, help="approximate time for each line (%(default)s)")
    return made


def sweep_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program that measures tables of sizes, with warm and with cold caches."""
    made = parser(description, seconds=4.0)
    made.add_argument("--most", default="100M", help="leave out larger messages (%(default)s)")
    made.add_argument("--caches", nargs="+", choices=("warm", "cold"), default=["warm", "cold"])
    return made


def measured(options: argparse.Namespace, sizes: str, **settings: Any) -> list[Result]:
    """Measure the sizes selected by the options of `sweep_parser`, and print the table.

    Raises:
        SystemExit: A result was wrong.
    """
    (most,) = parse_sizes(options.most)
    wanted = tuple(size for size in parse_sizes(sizes) if size <= most)
    if not wanted:
        return []
    results = run(Settings(sizes=wanted, seconds=options.seconds, **settings), shown=True)
    verdict = summary(results)
    print(verdict, flush=True)
    if any(result.wrong for result in results):
        raise SystemExit(verdict)
    return results


def between(results: list[Result], first: str, last: str) -> list[Result]:
    """Return the results of sizes from `first` to `last`."""
    (low,), (high,) = parse_sizes(first), parse_sizes(last)
    return [result for result in results if low <= result.nbytes <= high]
