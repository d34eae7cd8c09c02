"""A model over two ranks, as a pipeline: each batch is sent in small parts, so that both stages work in parallel.

Rank 0 drives: it sends a part to the first stage, and a reference to what comes out, not the values, to the
second. Gradients find their way back by distributed autograd, and each stage's parameters are stepped where they are.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import unisono as un
from unisono import rpc


@rpc.expose
class Stage:
    """Part of the model, on one rank."""

    def __init__(self, widths: list[int], last: bool, seed: int) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self._layers = nn.Sequential(*(layers[:-1] if last else layers)).double()
        # Use a separate generator: stages created concurrently in one process share torch's.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._layers.parameters():
                parameter.uniform_(-1 / 8, 1 / 8, generator=generator)

    def forward(self, given: torch.Tensor | rpc.RRef[torch.Tensor]) -> torch.Tensor:
        return self._layers(given.to_here() if isinstance(given, rpc.RRef) else given)

    def parameters(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self._layers.parameters()]


class Pipeline:
    """Two stages, on two ranks.

    Args:
        ranks: Where the stages live.
        parts: How many parts a batch is cut into.
        seed: Of the parameters.
    """

    def __init__(self, ranks: tuple[int, int], parts: int, seed: int) -> None:
        self._parts = parts
        self._first = rpc.remote(ranks[0], Stage, ([64, 64], False, seed))
        self._second = rpc.remote(ranks[1], Stage, ([64, 64, 10], True, seed + 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        passed = [self._first.remote().forward(part) for part in batch.chunk(self._parts)]
        out = [self._second.rpc_async().forward(middle) for middle in passed]
        return torch.cat([future.wait() for future in out])

    def parameters(self) -> list[rpc.RRef[nn.Parameter]]:
        return [*self._first.rpc_sync().parameters(), *self._second.rpc_sync().parameters()]


def run(
    comm: un.Communicator, steps: int = 60, parts: int = 4, seed: int = 0, lr: float = 0.1
) -> tuple[list[float], float]:
    """Return the losses, and the accuracy on held-out images, on rank 0."""
    rpc.init(comm, name=f"rank{comm.rank}")
    losses, accuracy = [], 0.0
    if comm.rank == 0:
        bunch = load_digits()
        images, labels = torch.tensor(bunch.data, dtype=torch.float64) / 16, torch.tensor(bunch.target)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, test = order[:1400], order[1400:]
        model = Pipeline((1 % comm.size, 2 % comm.size), parts, seed)
        optimizer = rpc.DistributedOptimizer(torch.optim.SGD, model.parameters(), lr=lr, momentum=0.9)
        for _ in range(steps):
            chosen = train[torch.randint(len(train), (128,), generator=generator)]
            with rpc.autograd.context() as context:
                loss = functional.cross_entropy(model.forward(images[chosen]), labels[chosen])
                rpc.autograd.backward(context, [loss])
                optimizer.step(context)
            losses.append(loss.item())
        accuracy = (model.forward(images[test]).argmax(1) == labels[test]).double().mean().item()
    rpc.shutdown()
    return losses, accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    given = parser.parse_args()
    losses, accuracy = un.launch(run, given.ranks)[0]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; accuracy {accuracy:.3f}")
