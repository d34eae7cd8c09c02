"""The whole demonstration, from its settings to its output."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

import unisono as un
from unisono.host.network import why_no_shm
from unisono.tools.bench.ranks import one_thread
from unisono.tools.demo.data import Pictures, load, split
from unisono.tools.demo.train import Batches, Weights, accuracy, build, sgd_step, train
from unisono.transports.hierarchical import transport_named

__all__ = [
    "DemoSettings",
    "PreparedDemo",
    "difference",
    "largest",
    "one_rank",
    "prepare",
    "ring_error",
    "several_ranks",
    "show",
]

_TOLERANCE = 1e-10
_TIMEOUT_S = 120.0
_PROOF_STEPS = 150


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of the demonstration; see `unisono demo --help`."""

    ranks: int = 2
    backend: str = "auto"
    epochs: int = 12
    data: Path | None = None
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PreparedDemo:
    """Validated settings of a demonstration, and the images for training and testing."""

    settings: DemoSettings
    backend: str
    training: Pictures
    held_out: Pictures

    def launch(self, program: Any, *args: Any) -> list[Any]:
        """Run a program, and return each rank's result."""
        chosen = self.settings
        return un.launch(
            program, chosen.ranks, self.backend, args=args, device=chosen.device, threads=1, timeout=_TIMEOUT_S
        )


def prepare(settings: DemoSettings) -> PreparedDemo:
    """Load the images and check everything that can be checked before the first rank starts.

    Raises:
        ValueError: A setting is invalid; the message lists the valid settings.
        UnavailableError: A package is missing; the message says how to install it.
    """
    for name, value, least in (
        ("ranks", settings.ranks, 1),
        ("epochs", settings.epochs, 1),
        ("seed", settings.seed, 0),
    ):
        if value < least:
            raise ValueError(f"--{name} must be at least {least}, not {value}")
    backend = _backend(settings)
    training, held_out = split(load(settings.data), settings.seed)
    if settings.ranks > len(training):
        raise ValueError(
            f"--ranks {settings.ranks} is more than the {len(training)} pictures to train on: each rank needs one"
        )
    return PreparedDemo(settings, backend, training, held_out)


def _backend(settings: DemoSettings) -> str:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here: leave out --device cuda")
    if settings.backend == "nccl" and settings.device == "cpu":
        raise ValueError("--backend nccl supports tensors on GPUs only: add --device cuda")
    if settings.backend != "auto":
        # For an unknown name, this look-up raises an error that lists the known names.
        transport_named(settings.backend)
        return settings.backend
    # NCCL needs one GPU per rank; other backends let ranks share a GPU.
    enough = settings.device == "cuda" and torch.cuda.device_count() >= settings.ranks
    return "nccl" if enough else "gloo" if why_no_shm() else "shm"


def show(ready: PreparedDemo, *, as_json: bool = False) -> int:
    """Train, prove and print; return the exit status: 0, or 1 if the proof failed.

    Args:
        ready: Result of `prepare`.
        as_json: Whether to print nothing but the results as JSON.
    """
    # Use one torch thread: a network this small trains fastest on one core, and ranks may themselves be threads of this
    # process.
    with one_thread():
        found = _run(ready, (lambda line: None) if as_json else _say)
    if as_json:
        print(json.dumps(found, indent=2))
    return 0 if found["proved"] else 1


def _run(ready: PreparedDemo, say: Callable[[str], None]) -> dict[str, Any]:
    settings = ready.settings
    training = ready.training
    steps = Batches(training, settings.ranks, settings.seed).steps
    total = len(training) + len(ready.held_out)
    say(f"{total} {training.name} in {training.classes} classes: {len(training)} to train on, the others held out")
    say(
        f"{_ranks(settings.ranks)}, backend {ready.backend}, {settings.device}; {settings.epochs} epochs of {steps} "
        f"steps, each of about {len(training) / steps:.0f} pictures over all ranks"
    )
    trained = ready.launch(train, training, settings.epochs, settings.seed, say is _say)
    seconds = trained[0].seconds
    communication_s = trained[0].communication_s
    say(f"trained in {seconds:.1f} s; in communication, waiting included: {communication_s:.1f} s on rank 0")
    proof_steps = min(settings.epochs * steps, _PROOF_STEPS)
    apart, ring = _errors(ready, proof_steps)
    say(
        f"proof: after {proof_steps} steps in float64, no weight differs between 1 rank and {_ranks(settings.ranks)} "
        f"by more than {apart:.1e}{_verdict(apart)}"
    )
    say(f'proof: all_reduce(algorithm="ring") differs from the plain sum by at most {ring:.1e}{_verdict(ring)}')
    model = build(training, settings.seed)
    model.load_state_dict(trained[0].weights)
    correct = accuracy(model, ready.held_out)
    say(f"test accuracy: {100 * correct:.1f} %")
    say(f"next: {_next(settings)}")
    return {
        "ranks": settings.ranks,
        "backend": ready.backend,
        "device": settings.device,
        "epochs": settings.epochs,
        "steps_per_epoch": steps,
        "seconds": seconds,
        "communication_s": communication_s,
        "accuracy": correct,
        "weights_error": apart,
        "ring_error": ring,
        "proved": apart <= _TOLERANCE and ring <= _TOLERANCE,
    }


def _errors(ready: PreparedDemo, steps: int) -> tuple[float, float]:
    """Return the largest weight difference between one and several ranks, and the largest ring all_reduce error."""
    settings = ready.settings
    finished = ready.launch(several_ranks, ready.training, steps, settings.seed)
    reference = one_rank(ready.training, steps, settings.seed, settings.ranks)
    apart = largest(difference(weights, reference) for weights in finished)
    return apart, largest(ready.launch(ring_error, settings.seed))


def _verdict(error: float) -> str:
    # Compare with `<=`, so that NaN counts as a failure.
    return "" if error <= _TOLERANCE else f": FAILED, at most {_TOLERANCE:.0e} is allowed"


def _ranks(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


def _next(settings: DemoSettings) -> str:
    """Return a command for another demonstration that works in this environment and directory."""
    python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable
    options = ["--ranks", "4"] if settings.ranks != 4 else ["--ranks", "3", "--backend", "thread"]
    return shlex.join([python, "-m", "unisono", "demo", *options])


def _say(line: str) -> None:
    # Flush the output, because ranks write to the same terminal.
    print(line, flush=True)


# A prime number, so that the ring's chunks differ in length.
_LENGTH = 100_003


def several_ranks(comm: un.Communicator, pictures: Pictures, steps: int, seed: int) -> Weights:
    """Return this rank's float64 weights after `steps` steps of distributed SGD."""
    batches = Batches(pictures, comm.size, seed)
    model = build(pictures, seed + comm.rank, torch.float64).to(comm.device)
    un.broadcast_parameters(model, comm)
    epochs = (batches.of(comm.rank, epoch) for epoch in count())
    for _ in islice(sgd_step(model, pictures, epochs, lambda: un.average_gradients(model, comm)), steps):
        pass
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def one_rank(pictures: Pictures, steps: int, seed: int, ranks: int) -> Weights:
    """Train one rank, without communication, on the global batches of `ranks` ranks; return its weights."""
    batches = Batches(pictures, ranks, seed)
    model = build(pictures, seed, torch.float64)
    for _ in islice(sgd_step(model, pictures, map(batches.whole, count()), lambda: None), steps):
        pass
    return dict(model.state_dict())


def difference(mine: Weights, theirs: Weights) -> float:
    """Return the largest difference between two sets of weights."""
    return largest(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def largest(errors: Iterable[float]) -> float:
    """Return the largest error, or NaN if any error is NaN; Python's `max` may ignore NaN."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def ring_error(comm: un.Communicator, seed: int) -> float:
    """Return the largest difference on this rank between a ring all_reduce of random numbers and their local sum."""
    total = torch.zeros(_LENGTH, dtype=torch.float64)
    mine = torch.empty(0)
    for rank in range(comm.size):
        generator = torch.Generator().manual_seed(seed + rank)
        numbers = torch.randn(_LENGTH, dtype=torch.float64, generator=generator)
        total += numbers
        mine = numbers.to(comm.device) if rank == comm.rank else mine
    comm.all_reduce(mine, algorithm="ring")
    return float((mine.cpu() - total).abs().max())
