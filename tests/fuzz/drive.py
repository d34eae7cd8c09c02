"""Fuzz every parser for some minutes each: python tests/fuzz/drive.py --minutes 10 [target ...]"""

from __future__ import annotations

import argparse
import resource
import secrets
import sys
import time
import tracemalloc
from random import Random

from fuzzing import Target, hostile, load_targets, smaller, tried

__all__ = ["drive", "main"]

_STRETCH, _MEASURED = 10_000, 200
"""Number of inputs per target, and number of inputs per measurement of memory; starting tracemalloc leaks 480 bytes."""
_GROWN_BYTES = 256 << 20


def drive(target: Target, seconds: float, seed: str | None = None) -> tuple[int, str | None]:
    """Return the number of inputs tried, and the faults, each with a short input that shows it."""
    run = secrets.token_hex(4) if seed is None else seed
    before, deadline, count = _resident(), time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        data = hostile(Random(f"{target.name} {run} {count}"), target.seeds)
        measured = count % _STRETCH < _MEASURED
        if measured is not tracemalloc.is_tracing():
            (tracemalloc.start if measured else tracemalloc.stop)()
        wrong = tried(target, data, measured=measured)
        count += 1
        if wrong is not None:
            tracemalloc.stop()
            return count, f"{wrong}; input {count - 1} of run {run}, in short {smaller(target, data)!r}"
    tracemalloc.stop()
    grown = _resident() - before
    if grown > _GROWN_BYTES:
        return count, f"{target.name}: the process has grown by {grown >> 20} MiB"
    return count, None


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each target")
    parser.add_argument("targets", nargs="*", help="names of files in targets/; all if none")
    asked = parser.parse_args()
    failed = 0
    for target in load_targets():
        if asked.targets and target.name not in asked.targets:
            continue
        count, wrong = drive(target, 60 * asked.minutes)
        failed += wrong is not None
        print(f"{target.name:20} {count:10} inputs  {wrong or 'fine'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
