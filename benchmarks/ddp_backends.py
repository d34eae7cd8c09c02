"""Time and results of an unchanged DDP training step on backend "unisono", compared with gloo.

Both train the same model side by side in one run, with DDP's best options for both (gradients as bucket
views), one thread per rank, SGD. Each pair of steps ends with a comparison of gradients and weights: for 2 ranks
they must be bitwise equal, and each line states how often they were.

Results (2 ranks, 2 cores, float32) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/ddp_backends.py [--ranks 2] [--models mlp deep transformer wide] [--seconds 10]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _questions import parser
from _training import ddp, perceptron, transformer
from torch import nn

import unisono as un
from unisono.tools.bench import interleave, on_ranks, timed

# A model, and the shape of its input on each rank.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: perceptron(128, 256, 256, 10), (32, 128)),
    "deep": (lambda: perceptron(*[128] * 41), (32, 128)),
    "transformer": (transformer, (2, 32, 384)),
    "wide": (lambda: perceptron(1024, 4096, 4096, 1024), (16, 1024)),
}


class Trainer:
    """A model in DDP on one group, and its steps."""

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        make, shape = MODELS[name]
        torch.manual_seed(1)
        self.model = ddp(make(), group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(shape, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the last step's gradients, averaged over the ranks, and the weights."""
        seen = {}
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            seen |= {f"gradient of {name}": p.grad, name: p.detach()}
        return seen


def compare(comm: un.Communicator, name: str, seconds: float, folder: Path) -> str:
    """Return one line: the step's time on unisono over that on gloo."""
    dist.init_process_group("unisono", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    ours, theirs = Trainer(name, dist.group.WORLD), Trainer(name, dist.new_group(backend="gloo"))
    checks = 0

    def verify() -> None:
        nonlocal checks
        # With more ranks, the two may add in different orders.
        if comm.size == 2:
            expected = theirs.state()
            other = [part for part, tensor in ours.state().items() if not torch.equal(tensor, expected[part])]
            if other:
                raise SystemExit(f"{name}: other bits than on gloo after {checks} checks: {', '.join(other)}")
            checks += 1

    samples = {"unisono": timed(ours.step, comm), "gloo": timed(theirs.step, comm)}
    timings = interleave(samples, comm, seconds=seconds, after_round=verify).slowest(comm)
    dist.destroy_process_group()
    size = sum(p.numel() for p in ours.model.parameters()) / 1e6
    same = f"gradients and weights the same bits in {checks} checks" if checks else "gradients not compared"
    ratio = timings.compared("unisono", "gloo")
    return f"{name:12} {size:5.1f} M, {comm.size} ranks, unisono / gloo: {ratio}; {same}"


def main() -> None:
    options = parser(__doc__, seconds=10.0)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    given = options.parse_args()
    for name in given.models:
        print(on_ranks(compare, given.ranks, "shm", (name, given.seconds))[0], flush=True)


if __name__ == "__main__":
    main()
