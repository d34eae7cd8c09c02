"""Quality of `algorithm="auto"`: its choice compared with the best algorithm, simulated and measured.

    python benchmarks/auto_choice.py [--simulated] [--most-ranks 1024]
    python benchmarks/auto_choice.py --measured [--backends gloo shm] [--ranks 2 4 8] [--seconds 2] [--most 1M]
    python benchmarks/auto_choice.py --native [--ranks 4] [--seconds 2] [--most 64M]

Simulated: constants are fitted from simulated calls of 2 ranks, and the choice is simulated on the real network. The
best is that of all algorithms and numbers of segments up to 32 ranks; above, what auto finds with the true constants.
Measured: ranks measure themselves by `comm.tune`, then auto and each algorithm take turns (A B, B A, ...); the ratio is
that of further neighbouring samples to the algorithm with the least median. Algorithms that take over 3 times as long
as auto in a first round are left out. Native: auto against gloo's own all_reduce. Without any of the three, simulated
is meant.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

import unisono as un
from unisono.algorithms import Network, find, serving, simulate
from unisono.collectives.tuning.cost_table import CostTable, LinkCost
from unisono.collectives.tuning.fit import Cell, fit
from unisono.collectives.tuning.prediction import Machine, compare
from unisono.tools.bench import interleave, on_ranks, parse_sizes, shown_size, timed

RANKS = (2, 3, 4, 5, 6, 8, 12, 16, 20, 31, 32, 48, 64, 96, 128, 200, 256, 384, 512, 1024)
SIZES = tuple(64 * 4**power for power in range(13))
NETWORK = Network(alpha=10e-6, bandwidth=1e9, gamma=0.1e-9)
PINGS = (("broadcast", "binomial"), ("reduce", "binomial"), ("all_reduce", "chunked_ring:segments=8"))
MOST = 32
SEGMENTS = (1, 2, 4, 8, 16, 32)
MEASURED = parse_sizes("8,256,4K,64K,1M,16M")


def fitted() -> CostTable:
    """Return the table that fits simulated calls of two ranks."""
    calls = [(*ping, nbytes) for ping in PINGS for nbytes in (8, 64 << 10, 1 << 20)]
    times = [simulate(collective, name, 2, nbytes, network=NETWORK).makespan for collective, name, nbytes in calls]
    found = fit([Cell(*call[:2], 2, call[2], seconds) for call, seconds in zip(calls, times, strict=True)])
    return CostTable(found.link, found.link, found.gamma, found.overhead)


def best_of(names: Iterable[str], size: int, nbytes: int) -> tuple[str, float]:
    """Return the algorithm with the least simulated time, and this, by simulating all."""
    times = {name: simulate("all_reduce", name, size, nbytes, network=NETWORK).makespan for name in names}
    best = min(times, key=times.__getitem__)
    return best, times[best]


def guided(names: list[str], size: int, nbytes: int) -> tuple[str, float]:
    """Return the same as auto finds it with the true constants, where simulating all would take hours."""
    link = LinkCost(NETWORK.alpha, 1 / NETWORK.bandwidth)
    choice = compare("all_reduce", names, size, nbytes, Machine(CostTable(link, link, NETWORK.gamma), size))
    return choice.algorithm, choice.predicted_s


def simulated(ranks: Iterable[int]) -> None:
    table, worst = fitted(), 0.0
    print(f"fitted: {table.inside}, gamma {table.gamma:.3g}, overhead {table.overhead:.3g}")
    print(f"{'ranks':>5} {'bytes':>6} {'auto':>30} {'us':>12} {'best':>30} {'us':>12} {'ratio':>6}")
    for size in ranks:
        names = serving("all_reduce", size)
        all_names = names + [
            f"{name}:segments={segments}"
            for name in names
            for segments in SEGMENTS
            if "segments" in getattr(find("all_reduce", name).file, "OPTIONS", {})
        ]
        for nbytes in SIZES:
            auto = compare("all_reduce", names, size, nbytes, Machine(table, size)).algorithm
            best, least = best_of(all_names, size, nbytes) if size <= MOST else guided(names, size, nbytes)
            seconds = simulate("all_reduce", auto, size, nbytes, network=NETWORK).makespan
            worst = max(worst, seconds / least)
            print(
                f"{size:>5} {shown_size(nbytes):>6} {auto:>30} {seconds * 1e6:>12.1f} {best:>30} "
                f"{least * 1e6:>12.1f} {seconds / least:>6.3f}",
                flush=True,
            )
    ring = simulate("all_reduce", "ring", 1024, 64, network=NETWORK).makespan
    auto = compare("all_reduce", serving("all_reduce", 1024), 1024, 64, Machine(table, 1024)).algorithm
    ratio = ring / simulate("all_reduce", auto, 1024, 64, network=NETWORK).makespan
    print(f"worst ratio to the best: {worst:.3f}; 64 B on 1024 ranks: {ratio:.0f} times as fast as ring")


def ratios(
    comm: un.Communicator, sizes: tuple[int, ...], seconds: float, native: bool, _folder: Path
) -> list[tuple[int, str, str, float, float]]:
    """Return for each size auto's algorithm, the best one or gloo's own, auto's seconds, and the ratio to the other."""
    torch.set_num_threads(1)
    comm.tune()
    found = []
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)
        auto = comm.plan("all_reduce", nbytes).algorithm
        names = ["native"] if native else [name for name in serving("all_reduce", comm.size) if name != auto]
        count = max(1, min(20, (256 << 10) // nbytes))
        samples = {
            name: timed(partial(comm.all_reduce, tensor, algorithm=name), comm, count=count)
            for name in ["auto", *names]
        }
        first = interleave(samples, comm, rounds=3, warmup=1).slowest(comm)
        kept = [name for name in names if first.of(name).median < 3 * first.of("auto").median] or names
        rounds = interleave({name: samples[name] for name in ["auto", *kept]}, comm, seconds=seconds).slowest(comm)
        best = min(kept, key=lambda name: rounds.of(name).median)
        # Samples of their own: of many algorithms that are equally fast, the best one has been lucky, too.
        rounds = interleave({name: samples[name] for name in ("auto", best)}, comm, seconds=seconds).slowest(comm)
        found.append((nbytes, auto, best, rounds.of("auto").median, rounds.ratio("auto", best).median))
    return found


def measured(given: argparse.Namespace, *, native: bool) -> None:
    (most,) = parse_sizes(given.most)
    sizes = tuple(nbytes for nbytes in (parse_sizes("8:64M:*4") if native else MEASURED) if nbytes <= most)
    for backend in ["gloo"] if native else given.backends:
        for size in given.ranks:
            results = on_ranks(ratios, size, backend, (sizes, given.seconds, native), timeout=600)[0]
            print(f"\n{backend}, {size} ranks{', more than cores' if size > (os.cpu_count() or 1) else ''}")
            print(f"{'bytes':>6} {'auto':>30} {'us':>10} {'native' if native else 'best other':>22} {'auto/other':>10}")
            for nbytes, auto, best, seconds, ratio in results:
                print(
                    f"{shown_size(nbytes):>6} {auto:>30} {seconds * 1e6:>10.1f} {best:>22} {ratio:>10.2f}", flush=True
                )
            mean = math.exp(statistics.mean(math.log(result[-1]) for result in results))
            print(f"worst {max(result[-1] for result in results):.2f}, mean {mean:.2f}; load {os.getloadavg()[0]:.1f}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("simulated", "measured", "native"):
        options.add_argument(f"--{name}", action="store_true")
    options.add_argument("--most-ranks", type=int, default=1024)
    options.add_argument("--backends", nargs="+", default=["gloo", "shm"])
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--most", default="64M")
    given = options.parse_args()
    if given.measured or given.native:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if given.simulated or not (given.measured or given.native):
        simulated(size for size in RANKS if size <= given.most_ranks)
    if given.measured:
        measured(given, native=False)
    if given.native:
        measured(given, native=True)


if __name__ == "__main__":
    main()
