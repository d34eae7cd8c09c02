"""Is an unchanged DDP training step faster on backend "unisono" than on gloo, and does it learn the same?

Both train the same model side by side in one run, DDP in its best form for both (gradients as views of
buckets), one thread a rank, SGD. Each pair of steps ends with a look at gradients and weights: for 2 ranks they
must be the same bits, and each line says how often they were.

Answer (2 ranks, 2 cores, float32): see docs/benchmarks.md; run it to see yours:

    python benchmarks/ddp_backends.py [--ranks 2] [--models mlp deep transformer wide] [--seconds 10]
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from _timing import side_by_side
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


# A model, and the shape of its input on each rank.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: perceptron(128, 256, 256, 10), (32, 128)),
    "deep": (lambda: perceptron(*[128] * 41), (32, 128)),
    "transformer": (transformer, (2, 32, 384)),
    "wide": (lambda: perceptron(1024, 4096, 4096, 1024), (16, 1024)),
}


class Trainer:
    """A model in DDP on one group, and its steps."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        make, shape = MODELS[name]
        torch.manual_seed(1)
        model = make()
        self.size = sum(p.numel() for p in model.parameters())
        # A fair race: also gloo gets what newer versions of torch can do.
        newer = {"batched_grad_copy": True} if "batched_grad_copy" in inspect.signature(DDP).parameters else {}
        self.model = DDP(model, process_group=group, gradient_as_bucket_view=True, **newer)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(shape, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """The last step's gradients, averaged over the ranks, and the weights."""
        seen = {}
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            seen |= {f"gradient of {name}": p.grad, name: p.detach()}
        return seen


DDP = DistributedDataParallel


def compare(comm: un.Communicator, path: str, name: str, seconds: float) -> str:
    """One line: the step's time on unisono over that on gloo."""
    dist.init_process_group("unisono", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    ours, theirs = Trainer(name, dist.group.WORLD), Trainer(name, dist.new_group(backend="gloo"))
    steps, checks = [0, 0], 0

    def step(which: int, trainer: Trainer) -> None:
        trainer.step()
        steps[which] += 1

    def verify() -> None:
        nonlocal checks
        # With more ranks, the two may add in another order.
        if comm.size == 2 and steps[0] == steps[1]:
            expected = theirs.state()
            other = [part for part, tensor in ours.state().items() if not torch.equal(tensor, expected[part])]
            if other:
                raise SystemExit(f"{name}: other bits than on gloo after {steps[0]} steps: {', '.join(other)}")
            checks += 1

    ratio = side_by_side(comm, lambda: step(0, ours), lambda: step(1, theirs), verify, seconds=seconds)
    dist.destroy_process_group()
    same = f"gradients and weights the same bits in {checks} checks" if checks else "gradients not compared"
    return f"{name:12} {ours.size / 1e6:5.1f} M, {comm.size} ranks, unisono / gloo: {ratio}; {same}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=10.0, help="for each model")
    options = parser.parse_args()
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            given = (str(Path(folder) / "store"), name, options.seconds)
            print(un.launch(compare, options.ranks, "shm", given, threads=1, timeout=120)[0], flush=True)


if __name__ == "__main__":
    main()
