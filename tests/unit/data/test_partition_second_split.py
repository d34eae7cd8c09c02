"""Samples that each rank draws for itself, and samples that are divided a second time."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from pairwise import pairwise, short
from torch.utils.data import DistributedSampler

import unisono as un
from unisono.testing import pool, run_ranks

COUNT = 8


class Order:
    """A sampler that draws from numpy's global generator, as mmdetection's `GroupSampler`."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(COUNT).tolist())

    def __len__(self) -> int:
        return COUNT


class OwnGenerator(Order):
    def __init__(self) -> None:
        self.chance = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        return iter(self.chance.permutation(COUNT).tolist())


class FreshGenerator(Order):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(COUNT).tolist())


class ByProcess(Order):
    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(os.getpid()).sample(range(COUNT), COUNT))


class Counting(OwnGenerator):
    """A private generator with the same seed on all ranks."""

    def __init__(self) -> None:
        self.chance = np.random.default_rng(3)


def sampler_of(comm: un.Communicator, kind: type[Order], whole: bool) -> Any:
    order = un.data.sampled(kind())
    if whole:
        return un.data.GlobalBatchSampler(range(COUNT), comm, batch_size=4, partition=order)
    return un.data.PartitionSampler(range(COUNT), comm, partition=order)


def epochs(comm: un.Communicator, kind: type[Order], whole: bool) -> list[list[Any]]:
    un.utils.seed(0, comm)
    sampler, found = sampler_of(comm, kind, whole), []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        if comm.rank == 0:
            # As for a progress bar: no rank waits for another one here.
            len(sampler)
        found.append(list(sampler))
        comm.all_reduce(torch.ones(1))
    return found


@pairwise(size=[2, 3], backend=["shm", "gloo"], kind=[Order, Counting], whole=[False, True])
def test_ranks_that_draw_the_same_share_it(kind: type[Order], whole: bool, backend: str, size: int) -> None:
    ranks = pool(backend, 3).run(epochs, kind, whole, size=size)
    for epoch in range(3):
        taken = [sample for rank in ranks for sample in rank[epoch]]
        assert sorted(np.concatenate(taken) if whole else taken) == list(range(COUNT))


@short(
    "size, kind, whole",
    product([2, 3], [OwnGenerator, FreshGenerator, ByProcess], [False, True]),
    [(2, OwnGenerator, False), (3, FreshGenerator, True), (2, ByProcess, False)],
)
def test_ranks_that_draw_other_samples_fail(kind: type[Order], whole: bool, size: int) -> None:
    errors = run_ranks(epochs, size, "shm", kind, whole, on_failure="continue")
    assert all("ranks have drawn different samples for epoch 0" in str(error) for error in errors)
    assert any(isinstance(error, ValueError) for error in errors)


def test_sampler_with_a_communicator_survives_it_and_pickling() -> None:
    with un.init() as comm:
        sampler = sampler_of(comm, Order, False)
        twin = pickle.loads(pickle.dumps(sampler))
        assert list(twin) == list(sampler)
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(COUNT))


def test_sampler_passes_for_torchs() -> None:
    sampler = un.data.PartitionSampler(range(5), num_replicas=2, rank=1)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas, sampler.num_samples, sampler.total_size) == (1, 2, 2, 5)
    with pytest.raises(TypeError, match=r"a PartitionSampler is a sampler: pass the dataset.*use_distributed_sampler"):
        un.data.GlobalBatchSampler(sampler, num_replicas=1, rank=0, batch_size=2)
