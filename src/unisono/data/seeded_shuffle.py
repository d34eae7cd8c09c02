"""Orders that depend on a seed alone, for as many samples as fit into memory."""

from __future__ import annotations

import random

import torch

__all__ = ["seeded_permutation"]


def seeded_permutation(count: int, seed: int) -> torch.Tensor:
    """The numbers below `count` in an order that depends on the seed alone. Costs about 0.1 us a sample.

    Of all generators' outputs only `Random.random` is promised to stay the same on every platform
    and in every version; hence a stable sort by such keys, not a library's shuffle.

    Example:
        >>> seeded_permutation(8, 1234).tolist()
        [2, 7, 1, 5, 6, 3, 4, 0]
    """
    draw = random.Random(seed).random
    return torch.tensor([draw() for _ in range(count)], dtype=torch.float64, device="cpu").argsort(stable=True)
