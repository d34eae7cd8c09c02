"""Synchronous distributed SGD: the network, its batches, the training loop, and the program of one rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import unisono as un
from unisono.data import DataPartitioner
from unisono.host.distribution import install_command
from unisono.tools.demo.data import Pictures

__all__ = [
    "BATCH",
    "Batches",
    "StepShare",
    "Tell",
    "TrainResult",
    "Weights",
    "accuracy",
    "build",
    "progress",
    "sgd_step",
    "train",
]

BATCH = 64
"""Maximum number of images per step over all ranks. If there are more ranks, each rank still gets one image."""


class StepShare(NamedTuple):
    """The images that one rank uses in one training step.

    Attributes:
        indices: Indices of the images.
        divisor: Number by which to divide the sum of the images' losses. The average of the results over all ranks is
            then the mean loss of the step's global batch.
    """

    indices: torch.Tensor
    divisor: float


class Batches:
    """Partition of the images over ranks, in which each rank's part is cut into the same number of batches.

    Args:
        pictures: Images to train on, at least one per rank.
        ranks: Number of ranks that share the images.
        seed: Seed for the partition, and for the order of images in each epoch.

    Attributes:
        steps: Number of steps in an epoch.
    """

    def __init__(self, pictures: Pictures, ranks: int, seed: int) -> None:
        partitioner = DataPartitioner(pictures, [1 / ranks] * ranks, seed)
        self._parts = [partitioner.use(rank).indices for rank in range(ranks)]
        self._seed = seed
        self.steps: int = min(-(-len(pictures) // BATCH), len(pictures) // ranks)

    def of(self, rank: int, epoch: int) -> list[StepShare]:
        """Return a rank's share of each step in an epoch. The shares contain each of the rank's images once."""
        return [StepShare(parts[rank], sum(map(len, parts)) / len(parts)) for parts in self._steps(epoch)]

    def whole(self, epoch: int) -> list[StepShare]:
        """Return shares for a single rank that uses the same images in each step as all ranks together."""
        return [StepShare(torch.cat(parts), sum(map(len, parts))) for parts in self._steps(epoch)]

    def _steps(self, epoch: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Return the indices of each rank's images in each step."""
        cuts = []
        for part in self._parts:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            cuts.append(part[torch.randperm(len(part), generator=generator)].tensor_split(self.steps))
        return zip(*cuts, strict=True)


def build(pictures: Pictures, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a network for the images' channels and classes, on the CPU, with weights that depend only on the seed.

    The global random generator is neither read nor changed, because ranks that are threads share it.
    """
    channels = pictures.x.shape[1]
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, pictures.classes),
        )
    model = model.to_empty(device="cpu").to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_uniform_(parameter, nonlinearity="relu", generator=generator)
        else:
            nn.init.zeros_(parameter)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, pictures: Pictures) -> float:
    """Return the fraction of the images that the network classifies correctly."""
    return float((model(pictures.x).argmax(dim=1) == pictures.y).double().mean())


Weights = dict[str, torch.Tensor]

_LEARNING_RATE = 0.1
_MOMENTUM = 0.5


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of training on one rank.

    Attributes:
        weights: Final weights, on the CPU.
        seconds: Time from the first step to the last.
        communication_s: Part of `seconds` spent inside the library, including waits for slower ranks.
    """

    weights: Weights
    seconds: float
    communication_s: float


def train(comm: un.Communicator, pictures: Pictures, epochs: int, seed: int, shown: bool = True) -> TrainResult:
    """Train on this rank's partition, together with all other ranks. Collective."""
    batches = Batches(pictures, comm.size, seed)
    # Each rank draws different weights; `broadcast_parameters` replaces them with rank 0's weights.
    model = build(pictures, seed + comm.rank).to(comm.device)
    clock = _Clock(comm.device)
    with progress(epochs, batches.steps, shown=shown and comm.rank == 0) as tell, _Clock(comm.device) as whole:
        with clock:
            un.broadcast_parameters(model, comm)
        steps = sgd_step(
            model,
            pictures,
            (batches.of(comm.rank, epoch) for epoch in range(epochs)),
            clock(lambda: un.average_gradients(model, comm)),
        )
        for loss in steps:
            tell(loss)
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return TrainResult(weights, whole.seconds, clock.seconds)


def sgd_step(
    model: nn.Module, pictures: Pictures, epochs: Iterable[list[StepShare]], average: Callable[[], None]
) -> Iterator[torch.Tensor]:
    """Run plain SGD, calling `average` between `backward` and `step`; yield each step's loss.

    Computations use the model's dtype and device.
    """
    like = next(model.parameters())
    x = pictures.x.to(like)
    y = pictures.y.to(like.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
    for shares in epochs:
        for share in shares:
            indices = share.indices.to(like.device)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x[indices]), y[indices], reduction="sum") / share.divisor
            loss.backward()
            average()
            optimizer.step()
            yield loss.detach()


class _Clock(ContextDecorator):
    """Context manager and decorator that adds up the time spent inside it, including pending GPU work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0.0
        self.seconds = 0.0

    def __enter__(self) -> _Clock:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += self._now() - self._start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


Tell = Callable[[torch.Tensor], None]


@contextmanager
def progress(epochs: int, steps: int, *, shown: bool) -> Iterator[Tell]:
    """Yield a callback that takes the loss of each step and, if `shown`, shows the progress."""
    if not shown:
        yield lambda loss: None
    elif not sys.stdout.isatty():
        yield _lines(epochs, steps)
    else:
        try:
            from rich.progress import Progress
        except ImportError:
            print(f"(for a progress bar: {install_command('cli')})", flush=True)
            yield _lines(epochs, steps)
        else:
            with Progress() as bar:
                task = bar.add_task("training", total=epochs * steps)

                def advance(loss: torch.Tensor) -> None:
                    bar.update(task, advance=1, description=f"training, loss {float(loss):.3f}")

                yield advance


def _lines(epochs: int, steps: int) -> Tell:
    """Return a callback that prints a line with this rank's mean loss after each epoch."""
    losses: list[torch.Tensor] = []

    def tell(loss: torch.Tensor) -> None:
        losses.append(loss)
        if len(losses) % steps == 0:
            mean = float(torch.stack(losses[-steps:]).mean())
            print(f"epoch {len(losses) // steps:2} of {epochs}: loss {mean:.4f}", flush=True)

    return tell
