"""Accuracy and bytes sent with compressed or less frequent averaging.

Results (4 ranks, digits, 5 seeds) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/compression_on_digits.py [--seeds 5] [--steps 400] [--ways fp16 int8 ...]

A perceptron of 200,000 parameters is trained by SGD with momentum on the digits of scikit-learn. Accuracy is the mean
over seeds on held-out pictures. Bytes are all that one rank sends for averaging, counted message by message,
including headers, scales and control messages, against a ring all_reduce of float32 every step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _questions import parser
from torch import nn

import unisono as un
from unisono import compression as codecs
from unisono.gradients import DiLoCo, LocalSGD
from unisono.tools.bench import on_ranks
from unisono.tools.demo.data import load, split
from unisono.wrappers.trace import Traced

RANKS, BATCH = 4, 16


@dataclass(frozen=True)
class Way:
    """A way to average gradients or parameters, and the minimum factor by which it reduces bytes."""

    start: Callable[[nn.Module, un.Communicator], Callable[[], object]]
    fewer: float
    period: int = 1


def averaged(compression: Callable[[], Any] | None) -> Callable[[nn.Module, un.Communicator], Callable[[], object]]:
    def start(model: nn.Module, comm: un.Communicator) -> Callable[[], object]:
        averager = un.GradientAverager(model, comm, compression=None if compression is None else compression())
        return lambda: averager

    return start


def local(model: nn.Module, comm: un.Communicator) -> Callable[[], object]:
    un.broadcast_parameters(model, comm)
    return LocalSGD(model, comm, every=8).step


def diloco(model: nn.Module, comm: un.Communicator) -> Callable[[], object]:
    un.broadcast_parameters(model, comm)
    return DiLoCo(model, comm, every=50, outer_lr=0.9, outer_momentum=0.5).step


WAYS = {
    "none": Way(averaged(None), 1.0),
    "fp16": Way(averaged(codecs.fp16), 1.98),
    "bf16": Way(averaged(codecs.bf16), 1.98),
    "int8": Way(averaged(codecs.int8), 3.9),
    "topk 1 %": Way(averaged(lambda: codecs.error_feedback(codecs.topk(ratio=0.01))), 40.0),
    # Two numbers for each row and each column; non-matrices are sent uncompressed. The bound is 0.98 of that formula.
    "powersgd 2": Way(averaged(lambda: codecs.error_feedback(codecs.powersgd(rank=2))), 0.98 * 200_842 / 4_318),
    "onebit": Way(averaged(lambda: codecs.error_feedback(codecs.onebit())), 28.0),
    "LocalSGD 8": Way(local, 7.9, 8),
    "DiLoCo 50": Way(diloco, 45.0, 50),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 320), nn.ReLU(), nn.Linear(320, 10)
    )


def train(comm: un.Communicator, way: str, seed: int, steps: int, folder: Path) -> float:
    """Return the accuracy after `steps` steps."""
    train_on, test_on = split(load(), seed=0)
    torch.manual_seed(seed)
    model = network()
    step_done = WAYS[way].start(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    # The order is the same on all ranks; each takes its part of every batch.
    order = torch.Generator().manual_seed(seed)
    picked = torch.cat([torch.randperm(len(train_on), generator=order) for _ in range(steps)])
    for step in range(steps):
        first = (step * comm.size + comm.rank) * BATCH
        indices = picked[first : first + BATCH]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train_on.x[indices]), train_on.y[indices]).backward()
        optimizer.step()
        step_done()
    un.broadcast_parameters(model, comm)
    with torch.no_grad():
        return float((model(test_on.x).argmax(1) == test_on.y).float().mean())


def sent(way: str) -> float:
    """Return the bytes that rank 0 sends in a step, on average over two periods."""
    steps = 2 * WAYS[way].period
    events: list[Any] = []

    def program(comm: un.Communicator) -> tuple[int, int]:
        torch.manual_seed(0)
        model = network()
        step_done = WAYS[way].start(model, comm)
        comm.barrier()
        before = len(events)
        for step in range(steps):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            for parameter in model.parameters():
                parameter.grad = None
            model(x).square().mean().backward()
            step_done()
        comm.barrier()
        return before, len(events)

    spans = un.launch(program, RANKS, "thread", wrap=lambda t: Traced(t, events.append), timeout=60)
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    # The two barriers send a negligible number of bytes: one per round.
    return sum(e.nbytes for e in events[first:last] if e.kind == "send" and e.rank == 0) / steps


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--seeds", type=int, default=5)
    given.add_argument("--steps", type=int, default=400)
    given.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = given.parse_args()
    numel = sum(p.numel() for p in network().parameters())
    ring = 2 * (RANKS - 1) / RANKS * numel * 4
    plain: float | None = None
    for name in options.ways:
        found = [on_ranks(train, RANKS, "shm", (name, seed, options.steps))[0] for seed in range(options.seeds)]
        accuracy = statistics.mean(found) * 100
        plain = accuracy if plain is None else plain
        bytes_sent = sent(name)
        fewer = ring / bytes_sent
        spread = f"{min(found) * 100:.1f} to {max(found) * 100:.1f}"
        print(
            f"{name:11} accuracy {accuracy:6.2f} % ({accuracy - plain:+.2f} points, each {spread}), "
            f"{bytes_sent:9.0f} B a step, {fewer:6.2f} times fewer ({WAYS[name].fewer:.2f} wanted)",
            flush=True,
        )


if __name__ == "__main__":
    main()
