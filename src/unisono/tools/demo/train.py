"""Synchronous distributed SGD: the training loop, and the program of one rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import unisono as un
from unisono.host.distribution import install_command
from unisono.tools.demo.batches import Batches, StepShare
from unisono.tools.demo.data import Pictures
from unisono.tools.demo.model import build

__all__ = ["Tell", "TrainResult", "Weights", "progress", "sgd_step", "train"]

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
    """Train on this rank's partition, together with all other ranks. Runs on each rank."""
    batches = Batches(pictures, comm.size, seed)
    # Each rank draws its own weights; rank 0's are then broadcast.
    model = build(pictures, seed + comm.rank).to(comm.device)
    clock = _Clock(comm.device)
    with progress(epochs, batches.steps, shown=shown and comm.rank == 0) as tell, _Clock(comm.device) as whole:
        with clock:
            un.broadcast_parameters(model, comm)
        steps = sgd_step(
            model,
            pictures,
            (batches.of(comm.rank, epoch) for epoch in range(epochs)),
            clock.around(lambda: un.average_gradients(model, comm)),
        )
        for loss in steps:
            tell(loss)
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return TrainResult(weights, whole.seconds, clock.seconds)


def sgd_step(
    model: nn.Module, pictures: Pictures, epochs: Iterable[list[StepShare]], average: Callable[[], None]
) -> Iterator[torch.Tensor]:
    """Run plain SGD, calling `average` between `backward` and `step`; yield each step's loss.

    Works in the model's dtype, on its device.
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


class _Clock:
    """Sums up the time inside its `with`, including pending GPU work."""

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

    def around(self, action: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            with self:
                action()

        return timed


Tell = Callable[[torch.Tensor], None]


@contextmanager
def progress(epochs: int, steps: int, *, shown: bool) -> Iterator[Tell]:
    """Yield a callback for the loss of each step; it prints nothing unless `shown`."""
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
    """A line after each epoch: its mean loss on this rank."""
    losses: list[torch.Tensor] = []

    def tell(loss: torch.Tensor) -> None:
        losses.append(loss)
        if len(losses) % steps == 0:
            mean = float(torch.stack(losses[-steps:]).mean())
            print(f"epoch {len(losses) // steps:2} of {epochs}: loss {mean:.4f}", flush=True)

    return tell
