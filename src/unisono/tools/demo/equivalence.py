"""Proof that several ranks compute the same as one rank, and that the ring computes the sum."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch

import unisono as un
from unisono.tools.demo.batches import Batches
from unisono.tools.demo.data import Pictures
from unisono.tools.demo.model import build
from unisono.tools.demo.train import Weights, sgd_step

__all__ = ["difference", "largest", "one_rank", "ring_error", "several_ranks"]

# Not divisible by any number of ranks below it, so the ring's chunks differ in length.
_LENGTH = 100_003


def several_ranks(comm: un.Communicator, pictures: Pictures, steps: int, seed: int) -> Weights:
    """Return this rank's float64 weights after `steps` steps of distributed SGD."""
    batches = Batches(pictures, comm.size, seed)
    model = build(pictures, seed + comm.rank, torch.float64).to(comm.device)
    un.broadcast_parameters(model, comm)
    epochs = (batches.of(comm.rank, epoch) for epoch in range(_epochs(steps, batches)))
    for _ in islice(sgd_step(model, pictures, epochs, lambda: un.average_gradients(model, comm)), steps):
        pass
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def one_rank(pictures: Pictures, steps: int, seed: int, ranks: int) -> Weights:
    """Return the same weights from a plain loop without communication, over the same global batches as `ranks` had."""
    batches = Batches(pictures, ranks, seed)
    model = build(pictures, seed, torch.float64)
    epochs = (batches.whole(epoch) for epoch in range(_epochs(steps, batches)))
    for _ in islice(sgd_step(model, pictures, epochs, lambda: None), steps):
        pass
    return dict(model.state_dict())


def difference(mine: Weights, theirs: Weights) -> float:
    """Return the largest difference of any weight."""
    return largest(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def largest(errors: Iterable[float]) -> float:
    """Return the largest error, or NaN if any is NaN, which Python's `max` may skip."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def ring_error(comm: un.Communicator, seed: int) -> float:
    """Return this rank's largest difference between a ring all_reduce of random numbers and their local sum."""
    total, mine = torch.zeros(_LENGTH, dtype=torch.float64), torch.empty(0)
    for rank in range(comm.size):
        generator = torch.Generator().manual_seed(seed + rank)
        numbers = torch.randn(_LENGTH, dtype=torch.float64, generator=generator)
        total += numbers
        mine = numbers.to(comm.device) if rank == comm.rank else mine
    comm.all_reduce(mine, algorithm="ring")
    return float((mine.cpu() - total).abs().max())


def _epochs(steps: int, batches: Batches) -> int:
    return -(-steps // batches.steps)
