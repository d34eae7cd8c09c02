"""Step time of ShardedModel against torch's fully_shard, on gloo and on shared memory, and memory by formula.

Both train the same transformer of 10.6 M parameters (6 blocks, each a unit) with SGD side by side in one run, one
thread per rank. fully_shard runs on gloo, or on backend "unisono" over shared memory. Parameters are compared at the
end. Memory is counted in bytes of live storages.

Results (2 cores, float32) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/sharded_model.py [--ranks 2 4] [--backends shm gloo] [--seconds 10]
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from _questions import parser
from _training import transformer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import unisono as un
from unisono.tools.bench import interleave, on_ranks, timed

SHAPE = (2, 64, 384)


class Trainer:
    """A sharded model, and its steps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self.model, self.optimizer = model, optimizer
        self.batch = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def made() -> nn.Module:
    torch.manual_seed(1)
    return transformer()


def compare(comm: un.Communicator, seconds: float, folder: Path) -> str:
    """Return one line: the step's time over that of fully_shard."""
    backend = "gloo" if comm.backend == "gloo" else "unisono"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    model = made()
    sharded = un.sharding.ShardedModel(model, comm)
    ours = Trainer(model, sharded.optimizer(torch.optim.SGD, lr=1e-3), comm.rank)
    other = made()
    mesh = DeviceMesh("cpu", list(range(comm.size)))
    for block in other.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(other, mesh=mesh)
    theirs = Trainer(other, torch.optim.SGD(other.parameters(), lr=1e-3), comm.rank)
    samples = {"ours": timed(ours.step, comm), "fully_shard": timed(theirs.step, comm)}
    timings = interleave(samples, comm, seconds=seconds, warmup=4).slowest(comm)
    with sharded.full_parameters(writeback=False):
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        far = max((p - q.full_tensor()).abs().max().item() for p, q in pairs)
    if far > 1e-5:
        raise SystemExit(f"other parameters than those of fully_shard, by {far:.2e}")
    dist.destroy_process_group()
    return f"{comm.size} ranks, {comm.backend}: ours / fully_shard: {timings.compared('ours', 'fully_shard')}"


def main() -> None:
    options = parser(__doc__, seconds=10.0)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    given = options.parse_args()
    for ranks in given.ranks:
        for backend in given.backends:
            print(on_ranks(compare, ranks, backend, (given.seconds,), timeout=600)[0], flush=True)


if __name__ == "__main__":
    main()
