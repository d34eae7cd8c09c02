"""How many bytes do the torch operations of an all_reduce through shared memory read and write?

Answer: see docs/benchmarks.md; it is counted, not timed, so it is the same everywhere:

    python benchmarks/shm_traffic.py [--mib 16] [--ranks 2 4 8]

In units of the message, S, on the rank that moves most. Nothing can move less than 2 S. Compiled parts, which move no
more than what they stand in for, are left out: nobody counts what they do.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

import unisono as un
from unisono.bench import Finding, Spread, counted, on_ranks
from unisono.compiled import NO_EXTENSIONS

REGISTERED = {2: 2.5, 4: 3.75, 8: 2.9}


def count(comm: un.Communicator, nbytes: int, registered: bool, folder: Path) -> list[list[float]]:
    """For each rank: bytes moved, and those of the largest tensor that an operation made, in units of the message."""
    numel = nbytes // 4
    tensor = comm.empty(numel) if registered else torch.empty(numel)
    tensor.fill_(1)
    # What the first call makes, later ones use again.
    comm.all_reduce(tensor)
    with counted() as traffic:
        comm.all_reduce(tensor)
    if not bool((tensor == comm.size**2).all()):
        raise SystemExit("wrong result")
    return [list(figures) for figures in comm.all_gather_object((traffic.moved / nbytes, traffic.largest_new / nbytes))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    # Ranks are processes that begin with this environment.
    os.environ[NO_EXTENSIONS] = "1"
    for ranks in options.ranks:
        for registered in (False, True):
            bound = REGISTERED.get(ranks, 3.0) if registered else 7 - 5 / ranks
            figures = on_ranks(count, ranks, "shm", (options.mib << 20, registered))
            memory = "registered" if registered else "ordinary"
            what = f"{ranks} ranks, {options.mib} MiB, {memory}"
            for name, values, most in (
                ("traffic in S", [moved for moved, _ in figures], bound),
                ("largest new tensor in S", [made for _, made in figures], 0.5),
            ):
                # The worst rank has to keep the bound.
                print(Finding(f"{what}, {name}", Spread(min(values), max(values), max(values)), most, most=True))


if __name__ == "__main__":
    main()
