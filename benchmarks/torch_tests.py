"""Time of a torch.distributed test on three thread, pooled process or simulated ranks.

    python benchmarks/torch_tests.py [--runs 30] [--ranks 3]

The test wraps a model of two layers by DDP, and makes one step. Printed for each backend: milliseconds of a run, the
shortest and quartiles, and the same of the processor time of this process.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from _questions import parser
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un

WARM = 3
MOST_MS = {"thread": 30.0, "process": 60.0}
"""The median of a run, on an idle machine."""


def step() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((4, 8), float(dist.get_rank()))).sum().backward()
    optimizer.step()


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    return " ".join(f"{1e3 * ordered[len(ordered) * part // 4]:.1f}" for part in range(4))


def measure(backend: str, size: int, runs: int) -> None:
    ranks = un.testing.torch_ranks(size, backend)
    for _ in range(WARM):
        ranks.run(step)
    wall = []
    processor = []
    for _ in range(runs):
        started = time.perf_counter()
        started_processor = time.process_time()
        ranks.run(step)
        wall.append(time.perf_counter() - started)
        processor.append(time.process_time() - started_processor)
    print(f"{backend}: {spread(wall)} ms, processor {spread(processor)} ms", flush=True)
    most_ms = MOST_MS.get(backend)
    if most_ms is not None:
        verdict = "kept" if 1e3 * sorted(wall)[runs // 2] <= most_ms else "MISSED"
        print(f"at most {most_ms:g} ms: {verdict}")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=30, help="runs on each backend (%(default)s)")
    made.add_argument("--ranks", type=int, default=3, help="number of ranks (%(default)s)")
    options = made.parse_args()
    for backend in ("thread", "process", "sim"):
        measure(backend, options.ranks, options.runs)


if __name__ == "__main__":
    main()
