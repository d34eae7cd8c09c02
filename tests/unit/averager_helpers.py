"""Small float64 models, their gradients in a single process, and a limit on the time until an error."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from averaged_models import gradients
from torch import nn

import unisono as un

__all__ = [
    "BACKENDS",
    "RANKS",
    "SMALL",
    "Found",
    "OddError",
    "check",
    "combined",
    "loss",
    "quickly",
    "right",
    "sample",
    "stack",
    "weight",
]

BACKENDS = ["thread", "shm", "gloo"]
RANKS = [
    ("thread", 3),
    ("gloo", 2),
    *(pytest.param(*case, marks=pytest.mark.soak) for case in (("thread", 2), ("shm", 2), ("shm", 3), ("gloo", 3))),
]
"""Backends and numbers of ranks: buckets are reduced at the end of a pass on threads, and during it over gloo."""
SMALL: dict[str, Any] = {"bucket_cap_mb": 128 / 2**20}
"""One 4x4 float64 weight in each bucket."""
_QUICK_S = 2.0

Found = list[torch.Tensor | None]


class OddError(Exception):
    """The error that a test raises on purpose."""


def stack(width: int = 4, count: int = 3, *, growth: int = 1) -> nn.Sequential:
    """Linear layers with the same numbers on every rank, each `growth` times as wide as the one before."""
    widths = [width * growth**index for index in range(count + 1)]
    # Ranks that are threads share torch's own generator.
    numbers = torch.Generator().manual_seed(0)
    model = nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in pairwise(widths)]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=width**-0.5, generator=numbers)
    return model


def sample(rank: int, width: int = 4) -> torch.Tensor:
    return torch.randn(5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def weight(model: nn.Sequential, index: int) -> nn.Parameter:
    """The weight of one layer."""
    return cast("nn.Parameter", model[index].weight)


def loss(model: nn.Sequential, rank: int) -> torch.Tensor:
    """The loss of a rank's sample, in the dtype of the model."""
    first = next(model.parameters())
    return cast("torch.Tensor", model(sample(rank, 4).to(first.dtype)).square().mean())


def combined(found: Sequence[Found], weights: Sequence[float] | None = None, *, total: bool = False) -> Found:
    """The mean, or the sum, of the gradients of each rank alone; a parameter that no rank used stays None."""
    factors = [1.0] * len(found) if weights is None else weights
    divisor = 1.0 if total else sum(factors)
    together: Found = []
    for parts in zip(*found, strict=True):
        there = [part * factor for part, factor in zip(parts, factors, strict=True) if part is not None]
        together.append(torch.stack(there).sum(0) / divisor if there else None)
    return together


def right(model: nn.Sequential, comm: un.Communicator) -> bool:
    """Return whether one more step gives the means over all ranks' samples. The old gradients are set to None."""
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = [loss(model, rank) for rank in range(comm.size)]
    wanted = torch.autograd.grad(torch.stack(losses).mean(), trained)
    model.zero_grad()
    loss(model, comm.rank).backward()
    found = [grad for grad in gradients(model) if grad is not None]
    return len(found) == len(wanted) and all(
        torch.allclose(grad, want) for grad, want in zip(found, wanted, strict=True)
    )


def check(averager: Any) -> object:
    """Call `averager.check()`, and return its result."""
    return averager.check()


@contextmanager
def quickly() -> Iterator[None]:
    """Fail if the block takes nearly as long as an operation's timeout, which is 10 s in a test."""
    began = time.perf_counter()
    yield
    took = time.perf_counter() - began
    assert took < _QUICK_S, f"took {took:.1f} s"
