"""Prove that collective algorithms count every contribution exactly once, don't deadlock, and have the declared cost.

Nothing is sent: the algorithm runs on sets of contributions instead of numbers. For a wrong algorithm, the command
reports the smallest number of ranks for which the algorithm fails, and the rank, step and chunk of the failure. After a
failure, the exit status is 1.

  unisono verify
  unisono verify ring --ranks 1..64
  unisono verify all_reduce/double_binary_tree --ranks 2,4,8 --option segments=16
  unisono verify my_ring.py --collective all_reduce --ranks 1..16
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any, cast

from unisono.collectives.algorithms import ALGORITHMS, COLLECTIVES, Algorithm, AlgorithmFile, find
from unisono.collectives.verify.prover import AlgorithmError, verify
from unisono.core.collective import family_of
from unisono.host.processors import shown
from unisono.tools.cli import UsageError, numbers, refusing

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the algorithms, the numbers of ranks and the format."""
    add = parser.add_argument
    add(
        "algorithm", nargs="?", help="a name (ring), a collective's algorithm (all_reduce/ring), or a file; all if None"
    )
    add("--ranks", default="1..16", help="numbers of ranks, such as 1..64 or 2,4,8 (%(default)s)")
    add("--collective", default="all_reduce", choices=COLLECTIVES, metavar="NAME", help="of a file (%(default)s)")
    add("--option", action="append", default=[], metavar="NAME=NUMBER", help="option of the algorithm")
    add("--json", action="store_true", help="print a list of proofs as JSON instead of the table")


def run(given: argparse.Namespace) -> int:
    """Prove the algorithms, and print a line for each of them."""
    sizes = _sizes(given.ranks)
    with refusing(ValueError):
        chosen = list(_chosen(given))
    found = [_prove(algorithm, sizes) for algorithm in chosen]
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        for proof in found:
            print(_line(proof))
    return 1 if any(proof["error"] for proof in found) else 0


def _sizes(text: str) -> list[int]:
    sizes: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise UsageError(f"--ranks takes numbers from 1 and ranges, such as 1..64 or 2,4,8, not {text!r}")
        sizes += range(first, last + 1)
    return sorted(set(sizes))


def _chosen(given: argparse.Namespace) -> Iterator[Algorithm]:
    options = numbers(given.option)
    name = given.algorithm
    if name is not None and name.endswith(".py"):
        yield Algorithm(given.collective, Path(name).stem, _file(Path(name)), options)
        return
    collective, _, short = (name or "").rpartition("/")
    if collective:
        yield find(collective, short, **options)
        return
    holding = [each for each in COLLECTIVES if name is None or name in ALGORITHMS[each]]
    if not holding:
        known = sorted({each for registry in ALGORITHMS.values() for each in registry.names()})
        raise UsageError(f"unknown algorithm {name!r}; known: {', '.join(known)}; or pass a file, such as my_ring.py")
    for each in holding:
        for algorithm in ALGORITHMS[each].names() if name is None else [name]:
            yield find(each, algorithm, **options)


def _file(path: Path) -> AlgorithmFile:
    """Run a file that the user named, and check that it defines an algorithm."""
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}")
    file = SimpleNamespace(**run_path(str(path), run_name=path.stem))
    if lacking := [function for function in ("steps", "cost") if not hasattr(file, function)]:
        raise UsageError(f"{str(path)!r} has no function {' and no '.join(lacking)}")
    return cast(AlgorithmFile, file)


def _prove(algorithm: Algorithm, sizes: list[int]) -> dict[str, Any]:
    """Prove one algorithm for each number of ranks in ascending order, up to the first failure."""
    proved: dict[int, Any] = {}
    refused: dict[int, str] = {}
    error = None
    for size in sizes:
        if reason := algorithm.unsupported(size):
            refused[size] = reason
            continue
        try:
            proved[size] = verify(algorithm.collective, algorithm, size)._asdict()
        except AlgorithmError as wrong:
            error = str(wrong)
            break
        proved[size]["cost"] = proved[size]["cost"]._asdict()
    return {
        "collective": algorithm.collective,
        "algorithm": algorithm.name,
        "options": dict(algorithm.options),
        "proved": proved,
        "refused": refused,
        "error": error,
    }


def _line(found: dict[str, Any]) -> str:
    name = f"{found['collective']}/{found['algorithm']}"
    if found["error"]:
        return f"{name}: WRONG  {found['error']}"
    proved = found["proved"]
    refused = found["refused"]
    if not proved:
        return f"{name}: {next(iter(refused.values()))}"
    cost = proved[max(proved)]["cost"]
    largest = max(proved)
    words = [
        f"proved for {shown(proved, dash='..', comma=', ')} ranks",
        f"at {largest}: rounds {cost['rounds']}, messages {cost['messages']}, chunks sent {cost['sent']}",
    ]
    if family_of(found["collective"]).reduces and all(proof["balanced"] for proof in proved.values()):
        words.append("balanced sums")
    elif not all(proof["same_bits"] for proof in proved.values()):
        words.append("exact dtypes only")
    if refused:
        words.append(f"refuses {shown(refused, dash='..', comma=', ')}")
    return f"{name}: {'; '.join(words)}"
