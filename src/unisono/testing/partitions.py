"""What must hold of every partitioner: plain functions that raise `AssertionError` if it does not.

A partitioner is called as `DataPartitioner` is. Every rank makes one of its own, as in a real job.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

__all__ = [
    "Partitioner",
    "Parts",
    "check_deterministic",
    "check_lossless",
    "check_partitioner",
    "check_random_state",
    "check_seed",
    "check_sizes",
]


class Parts(Protocol):
    """What a partitioner returns."""

    def use(self, rank: int) -> Iterable[int]:
        """The samples of this rank."""
        ...


Partitioner = Callable[[Sequence[int], Sequence[float], int], Parts]
"""Called with the samples, the fractions and a seed."""


def check_partitioner(partitioner: Partitioner, count: int, sizes: Sequence[float], seed: int) -> None:
    """All of the checks below that hold of any `count` samples, fractions and seed.

    Example:
        >>> from unisono.data import DataPartitioner
        >>> check_partitioner(DataPartitioner, count=10, sizes=[0.7, 0.2, 0.1], seed=0)
    """
    check_lossless(partitioner, count, sizes, seed)
    check_sizes(partitioner, count, sizes, seed)
    check_deterministic(partitioner, count, sizes, seed)
    check_random_state(partitioner, count, sizes, seed)


def check_lossless(partitioner: Partitioner, count: int, sizes: Sequence[float], seed: int) -> None:
    """Every sample is in exactly one part."""
    found = sorted(sample for part in _parts(partitioner, count, sizes, seed) for sample in part)
    lost, invented = set(range(count)).difference(found), set(found).difference(range(count))
    assert not lost, f"in no part: samples {sorted(lost)} of {count}, with sizes {list(sizes)}"
    assert not invented, f"no such samples: {sorted(invented)} of {count}, with sizes {list(sizes)}"
    assert len(found) == count, f"samples are in more than one place: {found}, with sizes {list(sizes)}"


def check_sizes(partitioner: Partitioner, count: int, sizes: Sequence[float], seed: int) -> None:
    """Every part is less than one sample away from its fraction (but for rounding of the fractions)."""
    for rank, (part, size) in enumerate(zip(_parts(partitioner, count, sizes, seed), sizes, strict=True)):
        assert abs(len(part) - size * count) < 1 + 1e-6, f"part {rank} has {len(part)} of {count}, but size {size}"


def check_deterministic(partitioner: Partitioner, count: int, sizes: Sequence[float], seed: int) -> None:
    """The same call gives the same parts, in the same order."""
    first, second = (_parts(partitioner, count, sizes, seed) for _ in range(2))
    assert first == second, f"two calls alike, with seed {seed}, gave {first} and {second}"


def check_random_state(partitioner: Partitioner, count: int, sizes: Sequence[float], seed: int) -> None:
    """Python's and torch's global generators are left as they were (drawing from one would change it)."""
    before = random.getstate(), torch.get_rng_state()
    _parts(partitioner, count, sizes, seed)
    assert random.getstate() == before[0], "Python's global random generator was changed"
    assert torch.equal(torch.get_rng_state(), before[1]), "torch's global random generator was changed"


def check_seed(partitioner: Partitioner) -> None:
    """Samples are shuffled, and another seed shuffles them otherwise."""
    orders = [_parts(partitioner, 100, [0.5, 0.5], seed)[0] for seed in (1, 2)]
    for order in orders:
        assert order != sorted(order), "the samples of a part are in their old order"
    assert orders[0] != orders[1], "seeds 1 and 2 shuffle alike"


def _parts(partitioner: Partitioner, count: int, sizes: Sequence[float], seed: int) -> list[list[int]]:
    return [list(partitioner(range(count), sizes, seed).use(rank)) for rank in range(len(sizes))]
