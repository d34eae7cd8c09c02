"""Sampled: the sequence of another sampler, dealt in turns."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.utils.data import SequentialSampler

from unisono.data.feistel import IndexShuffle
from unisono.data.indices import Indices, Listed
from unisono.data.partitions.strided import Strided

__all__ = ["PARTITIONER", "Sampled"]

# Ranks that are threads share the global generators, and often the sampler.
_one_at_a_time = threading.RLock()


class Sampled(Strided):
    """What another sampler gives, each to one rank: a `WeightedRandomSampler`, a `BatchSampler`, one of your own.

    An epoch's sequence depends on the seed and the epoch alone, so that it is the same on every rank: the sampler draws
    from a generator that is set for it (its own attribute `generator`, or that of the sampler inside it; a
    sampler without one draws from the global generators of Python and torch, which are set and put back).
    A sample that comes twice in the sequence is given out twice.

    Args:
        sampler: Anything that can be iterated over again and again. It has an order of its own: `shuffle` is False.

    Balance: less than one entry of the sequence away from the share. Cost: the whole sequence, on every rank.

    Example:
        >>> sampler = torch.utils.data.WeightedRandomSampler([1.0, 1.0, 8.0], num_samples=6)
        >>> ranks = [un.data.PartitionSampler(range(3), num_replicas=2, rank=r, partition=un.data.sampled(sampler))
        ...          for r in range(2)]
        >>> [len(list(rank)) for rank in ranks]
        [3, 3]
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler

    @classmethod
    def of(cls, dataset: Any) -> Self:
        return cls(SequentialSampler(dataset))

    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        if shuffle:
            raise ValueError("a sampler has an order of its own: leave shuffle out")
        # A number that depends on all bits of both.
        chance = IndexShuffle(1 << 62, seed, epoch)[0]
        with _one_at_a_time, _seeded(self._sampler, chance):
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            return Listed(list(self._sampler))

    def fingerprint(self) -> str:
        return f"Sampled {type(self._sampler).__name__}"


@contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """What the sampler draws from begins with this seed; afterwards it is as it was."""
    inner = sampler
    while not hasattr(inner, "generator") and hasattr(inner, "sampler"):
        inner = inner.sampler
    if hasattr(inner, "generator"):
        before = inner.generator
        inner.generator = torch.Generator().manual_seed(seed)
        try:
            yield
        finally:
            inner.generator = before
        return
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)


PARTITIONER = Sampled
