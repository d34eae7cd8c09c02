"""Many ranks on few processors: time from start to end, and private memory per rank.

    python benchmarks/many_ranks.py [--ranks 64] [--backends shm gloo]

Each rank sums 8 bytes with all others. Private memory is what /proc/self/smaps_rollup calls Private_Dirty and
Private_Clean: ranks of `launch` are forked from a process that has imported torch, whose pages they share. Exits with
1 above 60 s, or 60 MB a rank.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch
from _questions import parser

import unisono as un

MOST_S, MOST_BYTES = 60.0, 60e6


def private_bytes() -> int:
    """Return the bytes of memory that this process shares with no other."""
    words = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return sum(int(size) << 10 for name, size, *_ in words if name.startswith("Private_") and size.isdecimal())


def program(comm: un.Communicator) -> tuple[int, float, int, int]:
    total = torch.ones(2)
    comm.all_reduce(total)
    if total.tolist() != [comm.size] * 2:
        raise AssertionError(f"wrong sum {total}")
    threads, files = (sum(1 for _ in Path("/proc/self", folder).iterdir()) for folder in ("task", "fd"))
    used = resource.getrusage(resource.RUSAGE_SELF)
    memory = private_bytes()
    # The pages of a rank that has ended are private to the last one that shares them.
    comm.barrier()
    return memory, used.ru_utime + used.ru_stime, threads, files


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=64)
    options.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    given = options.parse_args()
    missed = False
    for backend in given.backends:
        start = time.perf_counter()
        found = un.launch(program, given.ranks, backend)
        elapsed = time.perf_counter() - start
        memory, processor, threads, files = (max(column) for column in zip(*found, strict=True))
        over = elapsed > MOST_S or memory > MOST_BYTES
        missed |= over
        print(
            f"{given.ranks} ranks, {backend}: {elapsed:.1f} s from start to end, {memory / 1e6:.1f} MB private, "
            f"{processor:.2f} s of processor time, {threads} threads and {files} open files a rank at most"
            f"{'   MISSED' if over else ''}",
            flush=True,
        )
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
