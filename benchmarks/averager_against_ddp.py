"""Cost of averaging in a training step: GradientAverager against torch's DDP on gloo, and against no averaging.

Results (2 and 4 ranks, 2 cores, float32, one thread per rank) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/averager_against_ddp.py [--ranks 2 4] [--backend shm] [--models mlp deep ...] [--seconds 8]
    python benchmarks/averager_against_ddp.py --steps 5 --warmup 3

The same model is trained by plain SGD in four ways, in turn in each rank: alone, alone with a barrier after backward,
in DDP with its best flags, and plain with a GradientAverager. Exposed time is a step's time over that of a step alone,
relative to DDP's; the barrier's exposed time is the wait for the slowest rank, which any averaging has. Processor
seconds are of the whole process with its threads, over those alone. Gradients are compared after each step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _questions import parser
from _training import ddp, perceptron, transformer
from torch import nn

import unisono as un
from unisono.tools.bench import interleave, on_ranks, timed

# A model, the shape of its input on each rank, and the maximum fraction of DDP's exposed time on 2 ranks.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "mlp": (lambda: perceptron(64, 256, 256, 10), (32, 64), 1 / 4),
    "deep": (lambda: perceptron(*[128] * 41), (32, 128), 1 / 4),
    "transformer": (transformer, (2, 64, 384), 1 / 4),
    "wide": (lambda: perceptron(2048, 4096, 4096), (8, 2048), 1 / 2.5),
}
LEAST = 48
"""Minimum steps of each way: with a dozen long steps, two medians differ by more than the bound."""

Figures = dict[str, list[float]]


class Way:
    """One way to train, and the processor seconds of its steps."""

    def __init__(self, name: str, wrap: Callable[[nn.Module], nn.Module], after: Callable[[], object]) -> None:
        torch.manual_seed(1)
        self.model, self.after = wrap(MODELS[name][0]()), after
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.cpu: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        cpu = time.process_time()
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.after()
        self.optimizer.step()
        self.cpu.append(time.process_time() - cpu)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def train(comm: un.Communicator, name: str, seconds: float, steps: int | None, warmup: int, folder: Path) -> Figures:
    """Return each way's seconds and processor seconds, by step."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    ways = {
        "local": Way(name, lambda model: model, lambda: None),
        "met": Way(name, lambda model: model, comm.barrier),
        "ddp": Way(name, lambda model: ddp(model, dist.group.WORLD), lambda: None),
        "ours": Way(name, lambda model: model, lambda: None),
    }
    un.GradientAverager(ways["ours"].model, comm)
    batch = torch.randn(MODELS[name][1], generator=torch.Generator().manual_seed(comm.rank))

    def compare() -> None:
        for ours, theirs in zip(ways["ours"].gradients(), ways["ddp"].gradients(), strict=True):
            same = torch.equal(ours, theirs) if comm.size == 2 else torch.allclose(ours, theirs, 1e-4, 1e-7)
            if not same:
                raise SystemExit(f"{name}: other gradients than DDP's, by {(ours - theirs).abs().max():.2e}")

    samples = {which: timed(lambda way=way: way.step(batch), comm) for which, way in ways.items()}
    timings = interleave(samples, comm, seconds=seconds, rounds=steps, least=LEAST, warmup=warmup, after_round=compare)
    dist.destroy_process_group()
    return timings.figures | {f"{which} cpu": way.cpu[-timings.rounds :] for which, way in ways.items()}


def report(name: str, ranks: int, backend: str, results: list[Figures]) -> str:
    """Return one line with the medians over all ranks."""

    def over_local(way: str, kind: str = "") -> list[float]:
        return [b - a for found in results for a, b in zip(found[f"local{kind}"], found[f"{way}{kind}"], strict=True)]

    middle = {way: statistics.median(t for found in results for t in found[way]) for way in ("local", "ddp", "ours")}
    ours, theirs = over_local("ours"), over_local("ddp")
    exposed, waited = (statistics.median(each) / statistics.median(theirs) for each in (ours, over_local("met")))
    quartiles = statistics.quantiles(a / b for a, b in zip(ours, theirs, strict=True) if b > 0)
    cpu = statistics.mean(over_local("ours", " cpu")) / statistics.mean(over_local("ddp", " cpu"))
    steps = statistics.median(a / b for found in results for a, b in zip(found["ours"], found["ddp"], strict=True))
    wanted = MODELS[name][2] if ranks == 2 else 1 / 2
    return (
        f"{name:12} {ranks} ranks, {backend}: step alone {middle['local'] * 1e3:8.3f} ms, ddp"
        f" {middle['ddp'] * 1e3:8.3f}, ours {middle['ours'] * 1e3:8.3f}; ours/ddp {steps:.2f}; exposed {exposed:.2f}"
        f" ({quartiles[0]:.2f} to {quartiles[2]:.2f}; {wanted:.2f} wanted; a barrier alone {waited:.2f});"
        f" processor {cpu:.2f} (0.33 wanted)"
    )


def main() -> None:
    options = parser(__doc__, seconds=8.0)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--backend", default="shm")
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--steps", type=int, help=f"counted steps of each way (as --seconds allow, at least {LEAST})")
    options.add_argument("--warmup", type=int, default=6, help="steps before them (%(default)s)")
    given = options.parse_args()
    for ranks in given.ranks:
        for name in given.models:
            found = on_ranks(train, ranks, given.backend, (name, given.seconds, given.steps, given.warmup), timeout=600)
            print(report(name, ranks, given.backend, found), flush=True)


if __name__ == "__main__":
    main()
