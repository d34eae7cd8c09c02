"""Cost of checking every collective before it sends data.

Results (2 ranks, float32, one thread per rank) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/checking_cost.py [--seconds 2] [--backends shm gloo]

Three communicators of the same ranks take turns in blocks of a few calls: one without checks, one with check="auto",
one with check="full"; a line is the median difference of neighbouring blocks. On shared memory all three compare
marks that are sent with each call.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from _questions import parser

import unisono as un
from unisono.tools.bench import Timings, clock, interleave, on_ranks, timed

SIZES = (8, 4096, 65536, 1 << 20, 16 << 20)
BLOCK_S = 0.02


def compare(comm: un.Communicator, nbytes: int, seconds: float, folder: Path) -> Timings:
    tensor = torch.ones(nbytes // 4)
    calls = {check: partial(comm.dup(check=check).all_reduce, tensor, "max") for check in ("off", "auto", "full")}
    block = comm.broadcast_object(max(1, int(BLOCK_S / clock([calls["auto"]] * 5))))
    counts = {"off": block, "auto": block, "full": max(1, block // 8)}
    samples = {check: timed(call, comm, count=counts[check]) for check, call in calls.items()}
    return interleave(samples, comm, seconds=seconds).slowest(comm)


def main() -> None:
    options = parser(__doc__, seconds=2.0)
    options.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    given = options.parse_args()
    for backend in given.backends:
        for nbytes in SIZES:
            timings = on_ranks(compare, 2, backend, (nbytes, given.seconds))[0]
            before = timings.of("off").median
            for check in ("auto", "full"):
                more = timings.difference(check, "off").median
                print(
                    f"{backend}, {nbytes} B, {check}: {before * 1e6:.1f} us unchecked, {more * 1e6:+.1f} us "
                    f"({100 * more / before:+.1f} %)",
                    flush=True,
                )
                most = 5e-6 if nbytes < 65536 else 0.1 * before
                if backend == "shm" and check == "auto" and more > most:
                    print("  MISSED: at most 5 us below 64 KiB, and 10 % from there on")


if __name__ == "__main__":
    main()
