"""Time and memory of sharded training against torch's own, side by side in one run.

A transformer of 10.6 M parameters (float32, one thread per rank) is trained by Adam in turn by ShardedOptimizer with a
GradientAverager (zero1), by ShardedOptimizer with shard_gradients (zero2), and by torch's ZeroRedundancyOptimizer with
DDP (torch), each with its best options: on shm, torch's run on backend "unisono"; on gloo, on torch's own. Losses of
all ways are compared after each step. Ratios are medians of neighbouring steps, of the slowest rank.

Memory is the bytes of all live float32 tensors after backward and after the step, over the formula: parameters 4 N,
gradients 4 N (zero2: 4 N / p), states 8 N / p. The peak of zero2 inside backward adds the buckets in flight.
Results are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/sharded_training.py [--ranks 1 2 4] [--backends shm gloo] [--seconds 20]
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _questions import parser
from _training import ddp, transformer
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Adam, Optimizer

import unisono as un
from unisono.tools.bench import interleave, on_ranks, timed

SHAPE = (2, 64, 384)
"""Batch, sequence and width on each rank."""
OPTIONS = {"lr": 1e-4}


def zero1(model: nn.Module, comm: un.Communicator) -> tuple[nn.Module, Optimizer]:
    un.GradientAverager(model, comm)
    return model, un.sharding.ShardedOptimizer(Adam, model, comm, **OPTIONS)


def zero2(model: nn.Module, comm: un.Communicator) -> tuple[nn.Module, Optimizer]:
    return model, un.sharding.ShardedOptimizer(Adam, model, comm, shard_gradients=True, **OPTIONS)


def torch_zero(model: nn.Module, comm: un.Communicator) -> tuple[nn.Module, Optimizer]:
    wrapped = ddp(model, dist.group.WORLD)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), Adam, parameters_as_bucket_view=True, **OPTIONS)


WAYS: dict[str, Callable[[nn.Module, un.Communicator], tuple[nn.Module, Optimizer]]] = {
    "zero1": zero1,
    "zero2": zero2,
    "torch": torch_zero,
}


def live_bytes() -> int:
    """Return the bytes in which live float32 tensors are stored: memory of messages is of other dtypes."""
    gc.collect()
    found = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.dtype == torch.float32 and t.numel()]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in found if t.is_contiguous())
    total = end = 0
    for start, stop in spans:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


class Way:
    """One way to train, and its last loss."""

    def __init__(self, name: str, comm: un.Communicator) -> None:
        torch.manual_seed(1)
        self.before = live_bytes()
        self.model, self.optimizer = WAYS[name](transformer(), comm)
        self.batch = torch.randn(SHAPE, generator=torch.Generator().manual_seed(comm.rank))
        self.loss = 0.0

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.loss = loss.item()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


def measure_memory(comm: un.Communicator, name: str, _folder: Path) -> str:
    """Return one line for a way of ours."""
    way = Way(name, comm)
    way.step()
    way.backward()
    after_backward = live_bytes() - way.before
    way.optimizer.step()
    after_step = live_bytes() - way.before
    numel = sum(p.numel() for p in way.model.parameters())
    kept = 4 * numel + 8 * numel / comm.size
    gradients = 4 * numel / (comm.size if name == "zero2" else 1)
    formula = kept + gradients, kept + (0 if name == "zero2" else gradients)
    ratios = after_backward / formula[0], after_step / formula[1]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{name} {comm.size} ranks: after backward {after_backward / 2**20:.1f} MiB, {ratios[0]:.3f} of the formula;"
        f" after step {after_step / 2**20:.1f} MiB, {ratios[1]:.3f}; peak RSS {rss:.0f} MiB"
    )


def measure_time(comm: un.Communicator, seconds: float, folder: Path) -> str:
    """Return the lines of all ways, on one backend."""
    backend = "gloo" if comm.backend == "gloo" else "unisono"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    ways = {name: Way(name, comm) for name in WAYS}

    def compare() -> None:
        losses = [way.loss for way in ways.values()]
        if max(losses) - min(losses) > 1e-4 * abs(losses[0]):
            raise SystemExit(f"losses differ: {dict(zip(WAYS, losses, strict=True))}")

    samples = {name: timed(way.step, comm) for name, way in ways.items()}
    timings = interleave(samples, comm, seconds=seconds, least=15, after_round=compare).slowest(comm)
    dist.destroy_process_group()
    return "\n".join(
        f"{comm.backend}, {comm.size} ranks: {name} / torch {timings.compared(name, 'torch')}"
        for name in ("zero1", "zero2")
    )


def main() -> None:
    options = parser(__doc__, seconds=20.0)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    given = options.parse_args()
    for ranks in given.ranks:
        for name in ("zero1", "zero2"):
            print(on_ranks(measure_memory, ranks, "shm", (name,))[0], flush=True)
        for backend in given.backends:
            print(on_ranks(measure_time, ranks, backend, (given.seconds,), timeout=600)[0], flush=True)


if __name__ == "__main__":
    main()
