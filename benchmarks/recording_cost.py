"""Cost of recording a transformer's training step.

Results (2 ranks, 2 cores, one thread per rank) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/recording_cost.py [--backend shm] [--ranks 2] [--seconds 30]

A transformer of 10.6 million parameters (6 layers of width 384) is trained on 8 sequences of 64 tokens a rank by plain
SGD with a GradientAverager. Each way has a model and a communicator of its own; steps take turns in each rank; the
ratio is the median over neighbouring pairs, with quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from _questions import parser
from _training import transformer

import unisono as un
from unisono.tools.bench import interleave, on_ranks, timed

MOST = 1.10


def step_of(comm: un.Communicator) -> Callable[[], None]:
    """Return a training step of a model of its own."""
    torch.manual_seed(1)
    model = transformer()
    un.GradientAverager(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(8, 64, 384, generator=torch.Generator().manual_seed(comm.rank))

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def train(comm: un.Communicator, seconds: float, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each way's steps, and the bytes that a recorded step writes."""
    plain = step_of(comm.dup())
    watched = comm.dup()
    recording = un.record(folder, watched)
    recorded = step_of(watched)
    samples = {"plain": timed(plain, comm), "recorded": timed(recorded, comm)}
    recorded()
    before = recording.nbytes
    recorded()
    nbytes = recording.nbytes - before
    timings = interleave(samples, comm, seconds=seconds, least=24, warmup=4)
    return timings.figures | {"nbytes": [nbytes]}


def main() -> None:
    options = parser(__doc__, seconds=30.0)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--backend", default="shm")
    given = options.parse_args()
    found = on_ranks(train, given.ranks, given.backend, (given.seconds,), timeout=600)
    pairs = [pair for each in found for pair in zip(each["recorded"], each["plain"], strict=True)]
    low, middle, high = statistics.quantiles(recorded / plain for recorded, plain in pairs)
    print(
        f"{given.ranks} ranks, {given.backend}: step {statistics.median(p for _, p in pairs) * 1e3:.1f} ms, "
        f"{statistics.median(r for r, _ in pairs) * 1e3:.1f} ms recorded; ratio {middle:.3f} ({low:.3f} to {high:.3f}; "
        f"at most {MOST} wanted); {found[0]['nbytes'][0] / 1e6:.1f} MB a step and rank, {len(pairs)} pairs"
    )


if __name__ == "__main__":
    main()
