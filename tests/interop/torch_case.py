"""Case of a test: a call with its results, equal on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Case", "Group", "collection", "drawn", "size"]


Group = Any
Case = Callable[[Group], list[torch.Tensor]]


def collection() -> tuple[dict[str, Case], Callable[[Case], Case]]:
    """Cases by name, and a decorator that puts one there."""
    cases: dict[str, Case] = {}

    def case(function: Case) -> Case:
        cases[function.__name__] = function
        return function

    return cases, case


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Other numbers on every rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return (
        torch.randint(-50, 50, shape, generator=generator).to(dtype).div(8 if dtype.is_floating_point else 1).to(dtype)
    )


def size() -> int:
    return dist.get_world_size()
