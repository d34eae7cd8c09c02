"""Cost of `un.interop.watch` on gloo: in a DDP step, and to the caller of a short all_reduce.

Each launch of the ranks is plain or watched for its whole life, in turns (plain, watched, watched, plain). A ratio is
that of the medians of two neighbouring launches; the line gives the median of these ratios with quartiles. The time of
the calling thread is that until an asynchronous all_reduce of 8 B returns; its waiting is not counted.

    python benchmarks/watch_cost.py [--ranks 2] [--rounds 5] [--seconds 6]
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from _questions import parser
from _training import ddp, perceptron

import unisono as un
from unisono.tools.bench import interleave, on_ranks, timed

WAYS = ("plain", "after", "before")
CALLS = 300


class Sample(NamedTuple):
    """Medians of one launch."""

    step_s: float
    call_s: float


def train(comm: un.Communicator, way: str, seconds: float, folder: Path) -> Sample:
    """Return the medians of this rank's steps, and of its short calls."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    watched = un.interop.watch(check=way) if way in ("after", "before") else None
    torch.manual_seed(1)
    model = ddp(perceptron(128, 256, 256, 10), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 128)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    steps = interleave({"step": timed(step, comm)}, comm, seconds=seconds, warmup=20).figures["step"]
    short = torch.ones(2)
    calls = []
    for _ in range(CALLS):
        began = time.perf_counter()
        work = dist.all_reduce(short, async_op=True)
        calls.append(time.perf_counter() - began)
        work.wait()
    if watched is not None:
        watched.close()
    dist.destroy_process_group()
    return Sample(statistics.median(steps), statistics.median(calls))


def main() -> None:
    options = parser(__doc__, seconds=6.0)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()

    def launched(way: str) -> Sample:
        found = on_ranks(train, given.ranks, "shm", (way, given.seconds))
        return Sample(max(each.step_s for each in found), max(each.call_s for each in found))

    for way in WAYS[1:]:
        pairs: list[tuple[Sample, Sample]] = []
        for _ in range(given.rounds):
            plain, watched = launched("plain"), launched(way)
            pairs += [(plain, watched)]
            watched, plain = launched(way), launched("plain")
            pairs += [(plain, watched)]
        low, middle, high = statistics.quantiles(watched.step_s / plain.step_s for plain, watched in pairs)
        plain_us = statistics.median(plain.call_s for plain, _ in pairs) * 1e6
        watched_us = statistics.median(watched.call_s for _, watched in pairs) * 1e6
        print(
            f"check={way:6}, {given.ranks} ranks: DDP step, watched / plain {middle:.3f} ({low:.3f} to {high:.3f}); "
            f"a short call's calling thread {watched_us:.0f} us, plain {plain_us:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
