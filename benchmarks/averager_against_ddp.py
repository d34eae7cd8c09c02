"""What does averaging cost a training step: GradientAverager beside torch's DDP on gloo and beside no averaging?

Answer (2 and 4 ranks, 2 cores, float32, one thread a rank): see docs/benchmarks.md; run it to see yours:

    python benchmarks/averager_against_ddp.py [--ranks 2 4] [--backend shm] [--models mlp deep ...] [--seconds 8]

The same model is trained by plain SGD in four ways, in turn in each rank: alone, alone with a barrier after backward,
in DDP with its best flags, and plain with a GradientAverager. Exposed is what a step takes longer than alone, by what
DDP's does; what the barrier exposes is ranks waiting for the slower one, which no averaging can do without. Processor
seconds are those of the whole process, its threads' too, more than alone. Gradients are compared after each step.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


# A model, the shape of its input on each rank, and the most of DDP's exposed time that is wanted for 2 ranks.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "mlp": (lambda: perceptron(64, 256, 256, 10), (32, 64), 1 / 4),
    "deep": (lambda: perceptron(*[128] * 41), (32, 128), 1 / 4),
    "transformer": (transformer, (2, 64, 384), 1 / 4),
    "wide": (lambda: perceptron(2048, 4096, 4096), (8, 2048), 1 / 2.5),
}


LEAST = 48
"""Steps of each way, at least: of a dozen long ones, two medians differ by more than what is asked."""


@dataclass
class Way:
    """One way to train, and what its steps took."""

    model: nn.Module
    after: Callable[[], object] = lambda: None
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def step(self, batch: torch.Tensor) -> None:
        cpu, began = time.process_time(), time.perf_counter()
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.after()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - cpu)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """DDP in its best form."""
    known = inspect.signature(DistributedDataParallel).parameters
    flags = {"batched_grad_copy": True} if "batched_grad_copy" in known else {}
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, **flags)


def train(comm: un.Communicator, path: str, name: str, seconds: float) -> dict[str, list[float]]:
    """Each way's seconds and processor seconds, step by step."""
    make, shape, _ = MODELS[name]
    models = []
    for _ in range(4):
        torch.manual_seed(1)
        models.append(make())
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    assert dist.group.WORLD is not None
    ways = {
        "local": Way(models[0]),
        "met": Way(models[1], comm.barrier),
        "ddp": Way(ddp(models[2], dist.group.WORLD)),
        "ours": Way(models[3]),
    }
    un.GradientAverager(models[3], comm)
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(comm.rank))
    order = list(ways)
    rounds = ended = 0
    started = time.perf_counter()
    while not ended:
        for which in order:
            comm.barrier()
            ways[which].step(batch)
        _compare(comm, ways, name)
        order = order[1:] + order[:1]
        rounds += 1
        ended = comm.broadcast_object(int(time.perf_counter() - started > seconds and rounds > LEAST))
    dist.destroy_process_group()
    found = {f"{name}": way.seconds[6:] for name, way in ways.items()}
    return found | {f"{name} cpu": way.cpu[6:] for name, way in ways.items()}


def _compare(comm: un.Communicator, ways: dict[str, Way], name: str) -> None:
    for ours, theirs in zip(ways["ours"].gradients(), ways["ddp"].gradients(), strict=True):
        same = torch.equal(ours, theirs) if comm.size == 2 else torch.allclose(ours, theirs, 1e-4, 1e-7)
        if not same:
            raise SystemExit(f"{name}: other gradients than DDP's, by {(ours - theirs).abs().max():.2e}")


def report(name: str, ranks: int, backend: str, results: list[dict[str, list[float]]]) -> str:
    """One line, of the medians of what all ranks took."""

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=8.0, help=f"for each model, and at least {LEAST} steps")
    options = parser.parse_args()
    for ranks in options.ranks:
        for name in options.models:
            with tempfile.TemporaryDirectory() as folder:
                given = (str(Path(folder) / "store"), name, options.seconds)
                found = un.launch(train, ranks, options.backend, given, threads=1, timeout=600)
            print(report(name, ranks, options.backend, found), flush=True)


if __name__ == "__main__":
    main()
