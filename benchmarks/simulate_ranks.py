"""Simulated ranks: real time per all_reduce and per event, by number of ranks.

Ranks are threads that take turns, so one core does all of it, and processor time is what a run takes on an idle core.
An event is a line of the trace: a message posted or arrived, or a request to the control plane. Results are compared.

    python benchmarks/simulate_ranks.py [--ranks 64 256 1000 4096]
"""

from __future__ import annotations

import time

import torch
from _bounds import BoundCheck
from _questions import parser

import unisono as un
from unisono.tools.bench import Spread

WANTED_S = {1000: 10.0, 4096: 60.0}


def one_sum(comm: un.Communicator) -> float:
    t = torch.ones(4)
    comm.all_reduce(t)
    return t[0].item()


def measure(ranks: int) -> float:
    """Print a line about this number of ranks, and return the processor seconds of the run."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    run = un.simulate(one_sum, ranks, seed=0)
    real_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    assert run.results == [float(ranks)] * ranks
    events = len(run.trace)
    print(
        f"{ranks:6} ranks {cpu_s:7.2f} s of processor time, {real_s:7.2f} s in all, "
        f"{events:7} events of {cpu_s / events * 1e6:4.0f} us, {run.time_s * 1e6:5.0f} us of virtual time",
        flush=True,
    )
    return cpu_s


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1000, 4096])
    given = made.parse_args()
    torch.set_num_threads(1)
    un.simulate(one_sum, 2, seed=0)
    spent_s = {ranks: measure(ranks) for ranks in given.ranks}
    for ranks, bound_s in WANTED_S.items():
        if ranks in spent_s:
            print(BoundCheck(f"all_reduce of {ranks} ranks, s", Spread.of([spent_s[ranks]]), bound_s, most=True))


if __name__ == "__main__":
    main()
