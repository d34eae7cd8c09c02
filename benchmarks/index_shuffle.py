"""Cost of shuffling 10^9 samples on a rank, compared with torch.randperm.

Results are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/index_shuffle.py [--samples 1000000000] [--exhaustive]

Memory is the growth of the process's peak resident size, in a separate process for each way. `torch.randperm` is run
at a hundredth of the samples, and its figures are scaled up. Times are wall clock on one thread, both ways in turn.
`--exhaustive` marks every sample of every rank for 1 to 8 ranks (1 GB, some ten minutes); without it a hundredth of
the samples is marked.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import torch
from _bounds import BoundCheck
from _questions import parser

import unisono as un
from unisono.tools.bench import Spread, interleave, timed

CHUNK = 16_384
BULK = 1 << 20
RANKS = 8
KIB = 1024


def resident(name: str) -> int:
    """`VmRSS` or `VmHWM` (the peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(name))


def growth(action: Callable[[], object]) -> int:
    """Return the bytes by which the action's peak exceeds the resident size before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def in_process(way: str, samples: int) -> tuple[int, int]:
    """Return the bytes that a way takes, of all memory and of Python's objects, in a separate process."""
    command = [sys.executable, __file__, "--way", way, "--samples", str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    whole, python = done.stdout.split()
    return int(whole), int(python)


def rank_of(samples: int, seed: int = 0) -> un.data.PartitionSampler:
    return un.data.PartitionSampler(range(samples), num_replicas=RANKS, rank=3, seed=seed)


def measure(way: str, samples: int) -> None:
    # Exclude one-time loading on first calls.
    list(islice(rank_of(5000), 600))
    torch.randperm(600)
    ways: dict[str, Callable[[], object]] = {
        "sampler": lambda: walk(iter(rank_of(samples)), 300_000),
        "randperm": lambda: torch.randperm(samples),
    }
    whole = growth(ways[way])
    tracemalloc.start()
    ways[way]()
    print(whole, tracemalloc.get_traced_memory()[1])


def walk(given: Iterator[int], most: int) -> None:
    for _ in islice(given, most):
        pass


def bulk(shuffle: un.data.IndexShuffle) -> None:
    for start in range(0, RANKS * BULK, RANKS * CHUNK):
        shuffle.take(torch.arange(start, start + RANKS * CHUNK, RANKS))


def exact(samples: int, ranks: int) -> bool:
    """Return whether every sample belongs to exactly one rank."""
    seen = torch.zeros(samples, dtype=torch.bool)
    shuffle = un.data.IndexShuffle(samples)
    given = 0
    for rank in range(ranks):
        sampler = un.data.PartitionSampler(range(samples), num_replicas=ranks, rank=rank)
        if next(iter(sampler)) != shuffle[rank]:
            return False
        for start in range(rank, samples, ranks * CHUNK):
            places = torch.arange(start, min(samples, start + ranks * CHUNK), ranks)
            seen[shuffle.take(places)] = True
            given += len(places)
    return given == samples and bool(seen.all())


def times(samples: int, turns: int) -> Iterator[BoundCheck | str]:
    shuffle, seeds = un.data.IndexShuffle(samples), count()
    ways: dict[str, Callable[[], object]] = {
        "first": lambda: next(iter(rank_of(samples, next(seeds)))),
        "bulk": lambda: bulk(shuffle),
        "list": lambda: walk(iter(rank_of(samples, next(seeds))), BULK),
        "randperm": lambda: torch.randperm(10 * BULK),
    }
    timings = interleave({name: timed(way) for name, way in ways.items()}, rounds=turns)
    yield BoundCheck(f"first of {samples} samples, ms", timings.of("first") * 1e3, 1.0, most=True)
    yield BoundCheck("an index in bulk, as a tensor, ns", timings.of("bulk") * (1e9 / BULK), 40.0, most=True)
    yield f"        an index from the sampler, as a number, ns: {timings.of('list').median * 1e9 / BULK:.2f}"
    yield f"        an index of torch.randperm of 10 million, ns: {timings.of('randperm').median * 1e8 / BULK:.2f}"


def memory(samples: int) -> Iterator[BoundCheck]:
    whole, python = in_process("sampler", samples)
    yield BoundCheck("memory of a rank, KiB", Spread.of([whole / KIB]), 1024, most=True)
    yield BoundCheck("memory of its Python objects, KiB", Spread.of([python / KIB]), 1024, most=True)
    part = max(1, samples // 100)
    randperm = in_process("randperm", part)[0] * samples / part
    yield BoundCheck("times as much takes torch.randperm", Spread.of([randperm / max(whole, 1)]), 1000)


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--samples", type=int, default=10**9)
    given.add_argument("--turns", type=int, default=15)
    given.add_argument("--exhaustive", action="store_true")
    given.add_argument("--way", choices=["sampler", "randperm"], help=argparse.SUPPRESS)
    options = given.parse_args()
    torch.set_num_threads(1)
    if options.way:
        measure(options.way, options.samples)
        return
    for finding in (*times(options.samples, options.turns), *memory(options.samples)):
        print(finding)
    marked = options.samples if options.exhaustive else max(1, options.samples // 100)
    for ranks in range(1, RANKS + 1):
        whole = Spread.of([float(exact(marked, ranks))])
        print(BoundCheck(f"{marked} samples are exactly one rank's, of {ranks}", whole, 1.0))


if __name__ == "__main__":
    main()
