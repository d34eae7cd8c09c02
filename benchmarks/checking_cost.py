"""What does it cost to check every collective before it moves anything?

Answer (2 ranks, float32, one thread a rank): see docs/benchmarks.md; run it to see yours:

    python benchmarks/checking_cost.py [--seconds 2] [--backends shm gloo]

Three communicators of the same ranks take turns in blocks of a few calls: one without checks, one with check="auto",
one with check="full"; a line is the difference of medians. On shared memory all three compare marks, which
travel with each call.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import unisono as un

SIZES = (8, 4096, 65536, 1 << 20, 16 << 20)
BLOCK_S = 0.02


def timed(comm: un.Communicator, tensor: torch.Tensor, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(tensor, "max")
    return (time.perf_counter() - started) / calls


def compare(comm: un.Communicator, seconds: float) -> list[tuple[str, float, float]]:
    plain, checked, full = comm.dup(check="off"), comm.dup(check="auto"), comm.dup(check="full")
    found = []
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4)
        calls = comm.broadcast_object(max(1, int(BLOCK_S / max(timed(checked, tensor, 3), 1e-6))))
        rows: list[tuple[float, float, float]] = []
        until = time.monotonic() + seconds
        while comm.broadcast_object(time.monotonic() < until):
            took = [0.0] * 3
            # In another order each time: what comes after the slowest one finds other caches.
            for turn in range(3):
                which = (turn + len(rows)) % 3
                took[which] = timed((plain, checked, full)[which], tensor, max(1, calls // 8) if which == 2 else calls)
            rows.append((took[0], took[1], took[2]))
        off, auto, whole = (statistics.median(column) for column in zip(*rows, strict=True))
        found += [(f"{nbytes} B, auto", off, auto), (f"{nbytes} B, full", off, whole)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size")
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    given = parser.parse_args()
    for backend in given.backends:
        for what, before, after in un.launch(compare, 2, backend, (given.seconds,), threads=1)[0]:
            more = (after - before) * 1e6
            part = f"{100 * more / before / 1e6:+.1f} %"
            print(f"{backend}, {what}: {before * 1e6:.1f} us unchecked, {more:+.1f} us ({part})")
            if backend == "shm" and "full" not in what:
                nbytes = int(what.split()[0])
                kept = more <= 5 if nbytes < 65536 else (after - before) <= 0.1 * before
                if not kept:
                    print("  MISSED: at most 5 us below 64 KiB, and 10 % from there on")


if __name__ == "__main__":
    main()
