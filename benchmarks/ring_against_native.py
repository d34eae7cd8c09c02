"""Is a ring written as a schedule as fast over gloo as gloo's own all_reduce?

Answer (2 ranks, 2 cores, float32, one thread a rank): see docs/benchmarks.md; run it to see yours:

    python benchmarks/ring_against_native.py [--ranks 2] [--mib 1 16 100] [--algorithm ring]
"""

from __future__ import annotations

import argparse

import torch
from _timing import side_by_side

import unisono as un

BOUNDS = {1: 1.1, 16: 1.1, 100: 1.3}


def compare(comm: un.Communicator, mib: int, algorithm: str, seconds: float) -> str:
    """One line: the schedule's time over the native call's, each verified with data that differs by rank and place."""
    count = (mib << 20) // 4
    given = torch.arange(count, dtype=torch.float32).remainder_(1000).add_(comm.rank)
    expected = torch.arange(count, dtype=torch.float32).remainder_(1000).mul_(comm.size)
    expected += sum(range(comm.size))
    tensor = given.clone()

    def verify() -> None:
        if not torch.equal(tensor, expected):
            raise SystemExit(f"wrong result at {mib} MiB")
        tensor.copy_(given)

    ratio = side_by_side(
        comm,
        lambda: comm.all_reduce(tensor, algorithm=algorithm),
        lambda: comm.all_reduce(tensor, algorithm="native"),
        verify,
        seconds=seconds,
    )
    return f"{algorithm} {mib:4} MiB, {comm.size} ranks: {ratio}; at most {BOUNDS.get(mib, float('nan'))} wanted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 100])
    parser.add_argument("--algorithm", default="ring")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each size")
    options = parser.parse_args()
    for mib in options.mib:
        lines = un.launch(
            compare, options.ranks, "gloo", (mib, options.algorithm, options.seconds), threads=1, timeout=120
        )
        print(lines[0], flush=True)


if __name__ == "__main__":
    main()
