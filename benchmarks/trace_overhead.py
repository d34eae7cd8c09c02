"""Cost of tracing a training step.

Results (2 ranks, 2 cores, one thread per rank) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/trace_overhead.py [--backend shm] [--ranks 2] [--seconds 20]

A model of 40 layers of 128 units is trained by plain SGD with a GradientAverager. Untraced and traced steps take
turns in each rank; the ratio is the median over neighbouring pairs, with quartiles.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from _questions import parser
from _training import perceptron

import unisono as un
from unisono.core.tracing import TraceEvent, recording
from unisono.tools.bench import interleave, on_ranks, timed

MOST = 1.02


def train(comm: un.Communicator, seconds: float, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each way's steps, and the events of a traced step."""
    torch.manual_seed(1)
    model = perceptron(*[128] * 41)
    un.GradientAverager(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(32, 128, generator=torch.Generator().manual_seed(comm.rank))
    events: list[TraceEvent] = []

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def traced_step() -> None:
        with recording(events.append):
            step()

    samples = {"untraced": timed(step, comm), "traced": timed(traced_step, comm)}
    timings = interleave(samples, comm, seconds=seconds, least=48, warmup=6)
    return timings.figures | {"events": [len(events) / (timings.rounds + 6)]}


def main() -> None:
    options = parser(__doc__, seconds=20.0)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--backend", default="shm")
    given = options.parse_args()
    found = on_ranks(train, given.ranks, given.backend, (given.seconds,), timeout=600)
    pairs = [pair for each in found for pair in zip(each["traced"], each["untraced"], strict=True)]
    low, middle, high = statistics.quantiles(traced / untraced for traced, untraced in pairs)
    print(
        f"{given.ranks} ranks, {given.backend}: step {statistics.median(u for _, u in pairs) * 1e3:.3f} ms untraced, "
        f"{statistics.median(t for t, _ in pairs) * 1e3:.3f} ms traced; ratio {middle:.3f} ({low:.3f} to {high:.3f}; "
        f"at most {MOST} wanted); {found[0]['events'][0]:.0f} events a step, {len(pairs)} pairs"
    )


if __name__ == "__main__":
    main()
