"""Sharded training (ZeRO-1, 2 and 3): loss curves, memory and time, next to torch's own.

A transformer of 10.6 M parameters (6 blocks, each a unit of ZeRO-3) is trained by Adam, one thread per rank:

    averaged       GradientAverager and a plain optimizer
    zero1, zero2   ShardedOptimizer with a GradientAverager; with shard_gradients=True
    zero3          ShardedModel
    torch          ZeroRedundancyOptimizer with DDP and its best options
    fully_shard    torch's, each block and the rest

- Curves: largest difference of a step's mean loss from that of one process with the batches of all ranks, relative,
  in float64; and whether all losses and parameters in float32 have the bits of `averaged`.
- Memory: peak of the bytes of live storages in forward, backward and step, over the formula, and peak RSS. Activations
  are of one token. Memory of the transport is not counted, nor zero1's gradients, which are in its averager's memory.
  In elements, for N parameters, w in the largest, r outside the blocks, u in a block: forward N + 2N/p (zero3: 3N/p + r
  + u). Backward in addition: zero2 the parts of all buckets up to one, that bucket if p > 1, and w; zero3 N/p +
  (2 - 1/p)(r + u) + 2w instead of r + u. Step in addition: this rank's gradients, and 2w. Where `comm.overlaps` (as on
  1 rank), one more unit in forward, and if p > 1 one more bucket or two more units in backward. The transport's: up to
  16 MiB with gloo.
- Time: median of the ratios of neighbouring steps, of the slowest rank, zero1 and zero2 to torch, zero3 to
  fully_shard; torch's run on backend "unisono" over shared memory, or on gloo.

To measure on your machine:

    python benchmarks/sharded_training.py [--ranks 1 2 4] [--backends shm gloo] [--seconds 20] [--steps 8]
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _questions import parser
from _training import ddp, transformer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Adam, Optimizer

import unisono as un
from unisono.tools.bench import interleave, on_ranks, timed
from unisono.utils.flatten import MIB, plan_buckets

sys.path.append(str(Path(__file__).parents[1] / "tests" / "unit"))
from live_storages import LiveStorages

OPTIONS: dict[str, Any] = {"lr": 1e-4, "eps": 1e-4}
SHAPE = (2, 64, 384)
"""Batch, sequence and width on each rank."""
OURS = ("zero1", "zero2", "zero3")
THEIRS = {"zero1": "torch", "zero2": "torch", "zero3": "fully_shard"}


def averaged(model: nn.Module, comm: un.Communicator) -> tuple[nn.Module, Optimizer]:
    un.GradientAverager(model, comm)
    return model, Adam(model.parameters(), **OPTIONS)


def zero1(model: nn.Module, comm: un.Communicator) -> tuple[nn.Module, Optimizer]:
    un.GradientAverager(model, comm)
    return model, un.sharding.ShardedOptimizer(Adam, model, comm, **OPTIONS)


def zero2(model: nn.Module, comm: un.Communicator) -> tuple[nn.Module, Optimizer]:
    return model, un.sharding.ShardedOptimizer(Adam, model, comm, shard_gradients=True, **OPTIONS)


def zero3(model: nn.Module, comm: un.Communicator) -> tuple[nn.Module, Optimizer]:
    return model, un.sharding.ShardedModel(model, comm).optimizer(Adam, **OPTIONS)


def torch_zero(model: nn.Module, _comm: un.Communicator) -> tuple[nn.Module, Optimizer]:
    wrapped = ddp(model, dist.group.WORLD)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), Adam, parameters_as_bucket_view=True, **OPTIONS)


def torch_fully(model: nn.Module, comm: un.Communicator) -> tuple[nn.Module, Optimizer]:
    mesh = DeviceMesh("cpu", list(range(comm.size)))
    for block in (*model.layers, model):
        fully_shard(block, mesh=mesh)
    return model, Adam(model.parameters(), **OPTIONS)


WAYS: dict[str, Callable[[nn.Module, un.Communicator], tuple[nn.Module, Optimizer]]] = {
    "averaged": averaged,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "torch": torch_zero,
    "fully_shard": torch_fully,
}


def made(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return transformer().to(dtype)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1000 * step + rank))


class Way:
    """One way to train, and its last loss."""

    def __init__(self, name: str, comm: un.Communicator, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.optimizer = WAYS[name](made(dtype), comm)
        self.batch, self.loss = batch(comm.rank).to(dtype), torch.zeros(())

    def forward(self) -> None:
        self.optimizer.zero_grad()
        self.loss = self.model(self.batch).square().mean()

    def backward(self) -> None:
        self.loss.backward()

    def step(self) -> None:
        self.forward()
        self.backward()
        self.optimizer.step()


# -- curves ---------------------------------------------------------------------------------------
def curve(comm: un.Communicator, name: str, dtype: torch.dtype, steps: int, _folder: Path) -> torch.Tensor:
    """Return the mean loss of each step."""
    way, losses = Way(name, comm, dtype), []
    for step in range(steps):
        way.batch = batch(comm.rank, step).to(dtype)
        way.step()
        losses.append(torch.tensor(comm.all_gather_object(way.loss.item()), dtype=torch.float64).mean())
    return torch.stack(losses)


def unsharded(ranks: int, steps: int) -> torch.Tensor:
    """Return the mean losses of one process with the batches of all ranks."""
    model, losses = made(torch.float64), []
    optimizer = Adam(model.parameters(), **OPTIONS)
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.stack([model(batch(rank, step).double()).square().mean() for rank in range(ranks)]).mean()
        total.backward()
        optimizer.step()
        losses.append(total.detach())
    return torch.stack(losses)


def show_curves(ranks: int, steps: int) -> None:
    wanted = unsharded(ranks, steps)
    args = torch.float32, steps
    plain = on_ranks(curve, ranks, "shm", ("averaged", *args), timeout=600)[0]
    for name in OURS:
        far = (on_ranks(curve, ranks, "shm", (name, torch.float64, steps), timeout=600)[0] - wanted).abs() / wanted
        found = on_ranks(curve, ranks, "shm", (name, *args), timeout=600)[0]
        missed = "" if far.max() <= 1e-12 else " MISSED"
        bits = "equal" if torch.equal(found, plain) else f"within {((found - plain) / plain).abs().max():.1e}"
        print(f"{name}  {ranks} ranks  float64 {far.max():.1e}{missed}  float32 bits of averaged: {bits}", flush=True)


# -- memory ---------------------------------------------------------------------------------------
def formula(name: str, model: nn.Module, ranks: int, *, overlaps: bool) -> tuple[float, float, float]:
    """Return the elements at the peaks of forward, backward and step."""
    sizes = [p.numel() for p in model.parameters()]
    n, u, w = sum(sizes), sum(p.numel() for p in model.layers[0].parameters()), max(sizes)
    r, kept = n - 6 * u, n + 2 * n / ranks
    # Gradients of a single rank are never on their way.
    several = ranks > 1
    if name == "zero1":
        # A single rank averages nothing, so its gradients are torch's.
        gradients = n if ranks == 1 else 0
        return kept, kept + gradients + w, kept + gradients + 2 * w
    if name == "zero2":
        plan = plan_buckets(list(model.parameters()), range(len(sizes) - 1, -1, -1), 25 * MIB)
        buckets = [sum(sizes[i] for i in bucket) for bucket in plan]
        parts = accumulate(buckets)
        in_flight = max(bucket * several + part / ranks for bucket, part in zip(buckets, parts, strict=True))
        if overlaps and several:
            parts = accumulate(buckets)
            in_flight = max(a + b + part / ranks for (a, b), part in zip(pairwise(buckets), parts, strict=False))
        return kept, kept + in_flight + w, kept + n / ranks + 2 * w
    kept, gathered = 3 * n / ranks, r + u
    backward = (2 - 1 / ranks) * gathered + 2 * w + 2 * u * (overlaps and several)
    forward = gathered + u * overlaps
    return kept + forward, kept + n / ranks + backward, kept + n / ranks + 2 * w


def memory(comm: un.Communicator, name: str, _folder: Path) -> str:
    """Return the line of one way."""
    with LiveStorages() as live:
        way = Way(name, comm)
        way.batch = way.batch[:1, :1]
        way.step()
        way.optimizer.zero_grad()
        peaks = []
        for phase in (way.forward, way.backward, way.optimizer.step):
            live.restart()
            phase()
            peaks.append(live.peak)
    wanted = formula(name, made(), comm.size, overlaps=comm.overlaps)
    pairs = [
        f"{peak / 2**20:.1f} MiB, {peak / 4 / elements:.3f}{'' if abs(peak / 4 / elements - 1) < 0.05 else ' MISSED'}"
        for peak, elements in zip(peaks, wanted, strict=True)
    ]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{name}  {comm.size} ranks  forward {pairs[0]}; backward {pairs[1]}; step {pairs[2]}; peak RSS {rss:.0f} MiB"
    )


# -- time -----------------------------------------------------------------------------------------
def times(comm: un.Communicator, ours: tuple[str, ...], theirs: str, seconds: float, folder: Path) -> str:
    """Return the lines of some ways beside one of torch."""
    backend = "gloo" if comm.backend == "gloo" else "unisono"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    ways = {name: Way(name, comm) for name in (*ours, theirs)}

    def compare() -> None:
        losses = {name: way.loss.item() for name, way in ways.items()}
        if max(losses.values()) - min(losses.values()) > 1e-4 * abs(losses[theirs]):
            raise SystemExit(f"losses differ: {losses}")

    samples = {name: timed(way.step, comm) for name, way in ways.items()}
    timings = interleave(samples, comm, seconds=seconds, least=15, warmup=4, after_round=compare).slowest(comm)
    dist.destroy_process_group()
    return "\n".join(
        f"{name} / {theirs}  {comm.size} ranks  {comm.backend}  {timings.compared(name, theirs)}" for name in ours
    )


def main() -> None:
    options = parser(__doc__, seconds=20.0)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    options.add_argument("--steps", type=int, default=8, help="steps of a curve (%(default)s)")
    options.add_argument("--parts", nargs="+", default=["curves", "memory", "times"])
    given = options.parse_args()
    for ranks in given.ranks if "curves" in given.parts else ():
        show_curves(ranks, given.steps)
    for ranks in given.ranks if "memory" in given.parts else ():
        for name in OURS:
            print(on_ranks(memory, ranks, "shm", (name,))[0], flush=True)
    for ranks in given.ranks if "times" in given.parts else ():
        for backend in given.backends:
            for theirs in ("torch", "fully_shard"):
                ours = tuple(name for name in OURS if THEIRS[name] == theirs)
                print(on_ranks(times, ranks, backend, (ours, theirs, given.seconds), timeout=600)[0], flush=True)


if __name__ == "__main__":
    main()
