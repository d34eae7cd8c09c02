"""Samplers inside loaders: torch's, and torchdata's that keeps their state; and batches of all ranks together."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import unisono as un
from unisono.data import EpochWarning, GlobalBatchSampler, PartitionSampler

# torchdata 0.11 calls what torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
DATA = list(range(53))


def loader(size: int, rank: int, workers: int = 0, **options: Any) -> StatefulDataLoader[Any]:
    sampler = PartitionSampler(DATA, num_replicas=size, rank=rank, **options)
    return StatefulDataLoader(DATA, batch_size=4, sampler=sampler, num_workers=workers)


def listed(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def flat(batches: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


# -- torchdata ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2])
def test_state_counts_samples_out_of_the_loader(workers: int) -> None:
    whole = [listed(loader(2, rank)) for rank in range(2)]
    for stop in (3,) if workers else range(8):
        old = loader(2, 0, workers)
        given = listed(islice(old, stop))
        state = old.state_dict()
        same = loader(2, 0, workers)
        same.load_state_dict(state)
        assert given + listed(same) == whole[0]
        if stop < 7:
            left = []
            for rank in range(3):
                other = loader(3, rank, workers if stop == 3 else 0)
                # Torchdata wants as many workers as before.
                if other.num_workers == workers:
                    other.load_state_dict(state)
                    left += flat(listed(other))
            assert not left or sorted(left + given_by(whole, stop)) == DATA


def given_by(whole: list[list[list[int]]], steps: int) -> list[int]:
    return [sample for rank in whole for batch in rank[:steps] for sample in batch]


def test_epochs_equal_those_of_torch_sampler() -> None:
    ours = loader(2, 0)
    orders = []
    for epoch in range(3):
        ours.sampler.set_epoch(epoch)
        orders.append(flat(listed(ours)))
    saved = ours.state_dict()
    assert len({tuple(order) for order in orders}) == 3
    resumed = loader(2, 0)
    resumed.load_state_dict(saved)
    resumed.sampler.set_epoch(1)
    assert flat(listed(resumed)) == orders[1]


def test_finished_loader_restarts_with_a_warning() -> None:
    ours = loader(2, 0)
    first = listed(ours)
    resumed = loader(2, 0)
    resumed.load_state_dict(ours.state_dict())
    with pytest.warns(EpochWarning):
        assert listed(resumed) == first


def test_resumed_loader_state_resumes() -> None:
    whole = listed(loader(2, 0))
    given, state = [], None
    for _ in range(5):
        ours = loader(2, 0)
        if state is not None:
            ours.load_state_dict(state)
        given += listed(islice(ours, 1))
        state = ours.state_dict()
    assert given == whole[:5]


# -- torch's loader ------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_samples_are_repeated_after_a_resume(workers: int) -> None:
    sampler = PartitionSampler(DATA, num_replicas=2, rank=0)
    trained = []
    for batch in islice(DataLoader(DATA, batch_size=4, sampler=sampler, num_workers=workers), 3):
        trained += batch.tolist()
        sampler.advance(len(batch))
    resumed = PartitionSampler(DATA, num_replicas=2, rank=0)
    resumed.load_state_dict(sampler.state_dict())
    loaded = DataLoader(DATA, batch_size=4, sampler=resumed)
    assert len(loaded) == 4
    assert trained + flat(listed(loaded)) == list(PartitionSampler(DATA, num_replicas=2, rank=0))


# -- batches of all ranks ------------------------------------------------------------------------------
def batches(size: int, rank: int, **options: Any) -> GlobalBatchSampler:
    return GlobalBatchSampler(DATA, batch_size=8, num_replicas=size, rank=rank, **options)


def together(ranks: list[GlobalBatchSampler]) -> list[list[int]]:
    return [sorted(flat(parts)) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_steps_hold_equal_samples_on_any_number_of_ranks(size: int) -> None:
    alone = [sorted(batch) for batch in batches(1, 0)]
    assert [len(batch) for batch in alone] == [8] * 6 + [5]
    assert together([batches(size, rank) for rank in range(size)]) == alone
    assert {len(batches(size, rank)) for rank in range(size)} == {7}
    for done in range(8):
        first = batches(3, 1)
        first.advance(done)
        ranks = [batches(size, rank) for rank in range(size)]
        for sampler in ranks:
            sampler.load_state_dict(first.state_dict())
        assert [len(sampler) for sampler in ranks] == [7 - done] * size
        assert together(ranks) == alone[done:]


def test_rank_keeps_its_batches_after_a_resume() -> None:
    whole = list(batches(3, 2))
    first = batches(3, 2)
    first.advance(3)
    again = batches(3, 2)
    again.load_state_dict(first.state_dict())
    assert list(again) == whole[3:]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_keep_their_state_in_torchdata_loader(workers: int) -> None:
    def ours(size: int) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(DATA, batch_sampler=batches(size, 0), num_workers=workers)

    old = ours(2)
    given = listed(islice(old, 3))
    assert given == listed(islice(ours(2), 3))
    same, other = ours(2), ours(1)
    for resumed in (same, other):
        resumed.load_state_dict(old.state_dict())
    assert given + listed(same) == list(batches(2, 0))
    assert [sorted(batch) for batch in listed(other)] == [sorted(batch) for batch in batches(1, 0)][3:]


def test_states_of_all_ranks_are_merged() -> None:
    ranks = [batches(3, rank) for rank in range(3)]
    for sampler in ranks:
        sampler.advance(2)
    resumed = batches(2, 0)
    resumed.load_state_dict([sampler.state_dict() for sampler in ranks])
    assert len(resumed) == 5
    ranks[1].advance()
    with pytest.raises(ValueError, match="must come from one job at one time: two of the same rank differ"):
        resumed.load_state_dict([sampler.state_dict() for sampler in ranks])


def test_short_last_batches() -> None:
    with pytest.raises(ValueError, match="last batch of an epoch of 53 samples has 5, too few for 6 ranks"):
        batches(6, 0)
    assert [len(batch) for batch in batches(6, 5, allow_empty_batches=True)] == [1] * 6 + [0]
    dropping = batches(6, 0, drop_last=True)
    assert (len(dropping), len(list(dropping))) == (6, 6)
    dropping.advance(6)
    dropping.set_epoch(1)
    assert len(list(dropping)) == 6


def test_batches_of_another_sampler() -> None:
    drawing = un.data.sampled(WeightedRandomSampler([1.0] * 53, num_samples=16))
    ranks = [batches(2, rank, partition=drawing) for rank in range(2)]
    assert [len(list(sampler)) for sampler in ranks] == [len(sampler) for sampler in ranks] == [2, 2]
    ranks[0].advance(2)
    with pytest.raises(ValueError, match="1 steps cannot have been taken: 0 samples are left"):
        ranks[0].advance()


def test_batches_of_another_number_of_ranks() -> None:
    first, second = batches(2, 0), batches(2, 1)
    first.advance(2)
    second.advance(1)
    states = [first.state_dict(), second.state_dict()]
    for like, done in ((None, 2), (1, 1)):
        comm = SimpleNamespace(rank=0, size=1, all_gather_object=lambda mine: states)
        follower = batches(2, 0)
        follower.rebuild(comm, like=like)
        assert [sorted(batch) for batch in follower] == [sorted(batch) for batch in batches(1, 0)][done:]


def test_wrong_batches_are_rejected() -> None:
    with pytest.raises(ValueError, match="batch_size must be 1 or more"):
        GlobalBatchSampler(DATA, batch_size=0)
    with pytest.raises(ValueError, match="deal samples in turns"):
        GlobalBatchSampler(DATA, batch_size=8, partition="contiguous")
    with pytest.raises(ValueError, match="8 steps cannot have been taken: 53 samples are left of epoch 0"):
        batches(2, 0).advance(8)


# -- other samplers ------------------------------------------------------------------------------------
class Drawing:
    """A sampler of one's own, that draws from the global generators."""

    def __iter__(self) -> Iterator[int]:
        import random

        return iter([random.randrange(100), *torch.randint(100, (9,)).tolist()])


class NumpyDrawing:
    """A sampler that draws from numpy's global generator, as many for detection and for classes do."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(21).tolist())


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 7, num_samples=50),
    "random": lambda: RandomSampler(range(21)),
    "batches": lambda: BatchSampler(RandomSampler(range(21)), 4, drop_last=False),
    "seeded": lambda: RandomSampler(range(21), generator=torch.Generator().manual_seed(1)),
    "own": Drawing,
    "numpy": NumpyDrawing,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_sampler_is_divided_round_robin(name: str) -> None:
    before = torch.get_rng_state()
    drawn = np.random.get_state()[1].tolist()
    # Every rank has a sampler of its own.
    ranks = [
        PartitionSampler(range(21), num_replicas=size, rank=rank, partition=un.data.sampled(SAMPLERS[name]()))
        for size, rank in ((1, 0), (3, 0), (3, 1), (3, 2))
    ]
    alone, *three = [list(sampler) for sampler in ranks]
    assert [three[turn % 3][turn // 3] for turn in range(len(alone))] == alone
    for sampler in ranks:
        sampler.set_epoch(1)
    assert list(ranks[0]) != alone
    ranks[1].advance(2)
    resumed = PartitionSampler(range(21), num_replicas=1, rank=0, partition=un.data.sampled(SAMPLERS[name]()))
    resumed.load_state_dict(ranks[1].state_dict())
    assert list(resumed) == list(ranks[0])[6:]
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == drawn


def test_sampler_order_is_independent() -> None:
    with pytest.raises(ValueError, match="its own order"):
        list(PartitionSampler(range(5), partition="sampled", shuffle=True))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_workers_start_under_launch_as_in_a_plain_script(backend: str) -> None:
    method = multiprocessing.get_start_method()
    assert un.launch(batches_of_workers, 2, backend) == [(method, [[0, 1], [2, 3]])] * 2


def batches_of_workers(comm: un.Communicator) -> tuple[str, list[list[int]]]:
    method = multiprocessing.get_start_method()
    # Where processes are forked, a worker takes functions that cannot be pickled.
    collate: Any = (lambda samples: [*samples]) if method == "fork" else list
    data: Any = range(4)
    return method, list(DataLoader(data, batch_size=2, num_workers=1, collate_fn=collate))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize(("count", "ranks", "batch"), [(5, 2, 1), (7, 3, 1), (10, 4, 2), (7, 2, 2)])
def test_uneven_ranks_draw_nothing_twice(count: int, ranks: int, batch: int, noticed: bool, workers: int) -> None:
    """The loop of a rank with fewer batches may have noticed the end when the state is saved, or not."""

    def made(rank: int) -> tuple[PartitionSampler, StatefulDataLoader[Any]]:
        sampler = PartitionSampler(range(count), num_replicas=ranks, rank=rank, seed=3)
        sampler.set_epoch(0)
        data: Any = range(count)
        return sampler, StatefulDataLoader(data, batch_size=batch, sampler=sampler, num_workers=workers)

    longest = math.ceil(math.ceil(count / ranks) / batch)
    for stop in range(longest + 1):
        drawn = []
        for rank in range(ranks):
            sampler, loader = made(rank)
            walk = iter(loader)
            first = [sample for _ in range(stop) for sample in next(walk, torch.empty(0)).tolist()]
            if noticed and len(first) == len(sampler):
                assert next(walk, None) is None
            state = loader.state_dict()
            sampler, loader = made(rank)
            loader.load_state_dict(state)
            drawn += [*first, *(sample for found in loader for sample in found.tolist())]
            sampler.set_epoch(1)
            assert sum(len(found) for found in loader) == len(sampler)
        assert sorted(drawn) == list(range(count)), stop
