"""Sampled: the output of another sampler, assigned to parts round-robin."""

from __future__ import annotations

import random
import sys
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

# Ranks that are threads share the global generators, and often the sampler, so only one rank may draw at a time.
_one_at_a_time = threading.RLock()


class Sampled(Strided):
    """Output of another sampler, such as a `WeightedRandomSampler` or `BatchSampler`, distributed over ranks.

    The sampler's random generator is seeded, so that an epoch's sequence depends only on the seed and the epoch, and is
    the same on every rank. If the sampler, or a sampler inside it, has an attribute `generator`, that generator is
    seeded; otherwise, the global generators of Python, numpy and torch are seeded, and restored afterwards. Ranks with
    a `Communicator` compare their sequences for each epoch, so a sampler that draws from any other source raises an
    error. A sample that occurs twice in the sequence is assigned twice.

    Args:
        sampler: Any object that can be iterated over repeatedly. The sampler defines the order, so `shuffle` must be
            False.

    Balance: each part's length differs from its share of the sequence by less than one entry. Cost: every rank draws
    the whole sequence.

    Example:
        >>> sampler = torch.utils.data.WeightedRandomSampler([1.0, 1.0, 8.0], num_samples=6)
        >>> ranks = [un.data.PartitionSampler(range(3), num_replicas=2, rank=r, partition=un.data.sampled(sampler))
        ...          for r in range(2)]
        >>> [len(list(rank)) for rank in ranks]
        [3, 3]
    """

    draws = True

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler

    @classmethod
    def of(cls, dataset: Any) -> Self:
        return cls(SequentialSampler(dataset))

    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        if shuffle:
            raise ValueError("a sampler has its own order: leave shuffle out")
        # Derive a seed that depends on every bit of both `seed` and `epoch`.
        chance = IndexShuffle(1 << 62, seed, epoch)[0]
        with _one_at_a_time, _seeded(self._sampler, chance):
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            return Listed(list(self._sampler))

    def fingerprint(self) -> str:
        return f"Sampled {type(self._sampler).__name__}"


@contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Seed the generator that the sampler draws from, and restore it afterwards."""
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
    # If the sampler draws from numpy, numpy has already been imported; otherwise, don't import it.
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(state)
            if numpy:
                numpy.random.set_state(drawn)


PARTITIONER = Sampled
