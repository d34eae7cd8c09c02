"""PartitionSampler as a replacement of torch's DistributedSampler."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import unisono as un
from unisono.data import EpochWarning, PartitionSampler
from unisono.testing import run_ranks
from unisono.testing.partitioners import Samples


def ranks(count: int, size: int, **options: Any) -> list[PartitionSampler]:
    return [PartitionSampler(range(count), num_replicas=size, rank=rank, **options) for rank in range(size)]


def merged(parts: Iterable[Iterable[int]]) -> list[int]:
    return sorted(chain.from_iterable(parts))


# -- as torch's ------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3, 8, 30])
@pytest.mark.parametrize("count", [1, 5, 10, 23])
@pytest.mark.parametrize("kind", [{"padding": True}, {"drop_last": True}])
def test_unshuffled_sampler_equals_torch(count: int, size: int, kind: dict[str, bool]) -> None:
    # torch's sampler fails if there are fewer samples than ranks.
    size = min(size, count) if "drop_last" in kind else size
    for rank, sampler in enumerate(ranks(count, size, shuffle=False, **kind)):
        torchs = DistributedSampler(range(count), size, rank, shuffle=False, drop_last=sampler.drop_last)
        assert list(sampler) == list(torchs)
        assert (len(sampler), sampler.num_samples) == (len(torchs), torchs.num_samples)
        assert sampler.total_size == torchs.total_size


def test_accepts_keyword_arguments_of_torch() -> None:
    given = {"num_replicas": 2, "rank": 1, "shuffle": True, "seed": 3, "drop_last": True}
    ours, torchs = PartitionSampler(range(9), **given), DistributedSampler(range(9), **given)
    assert {name: getattr(ours, name) for name in given} == {name: getattr(torchs, name) for name in given}
    assert len(ours) == len(torchs) == 4
    loaded = torch.cat(list(DataLoader(range(9), batch_size=3, sampler=ours)))
    assert loaded.tolist() == list(PartitionSampler(range(9), **given))


def test_padding_is_minimal() -> None:
    parts = [list(sampler) for sampler in ranks(10, 4, padding=True)]
    assert [len(part) for part in parts] == [3] * 4
    assert set(merged(parts)) == set(range(10))
    grouped = [list(sampler) for sampler in ranks(10, 4, padding=True, partition=un.data.grouped([0] * 7 + [1] * 3))]
    assert [len(part) for part in grouped] == [7] * 4
    assert {frozenset(part) for part in grouped[:2]} == {frozenset(range(7)), frozenset(range(7, 10))}


def test_any_communicator_is_accepted() -> None:
    methods = SimpleNamespace(rank=lambda: 1, size=lambda: 3)
    for comm in (SimpleNamespace(rank=1, size=3), methods):
        assert list(PartitionSampler(range(10), comm)) == list(ranks(10, 3)[1])
    parts = run_ranks(lambda comm: list(PartitionSampler(range(10), comm)), 3)
    assert merged(parts) == list(range(10))
    assert len(PartitionSampler(range(10))) == 10


def test_forgotten_set_epoch_warns_once() -> None:
    sampler = ranks(20, 2)[0]
    first = list(sampler)
    with pytest.warns(EpochWarning, match=r"epoch 0 begins again.*set_epoch"):
        assert list(sampler) == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(sampler) == first


def test_dropped_last_batch_is_reported() -> None:
    sampler = ranks(22, 2)[0]
    loader = DataLoader(range(22), batch_size=4, sampler=sampler, drop_last=True)
    for batch in loader:
        sampler.advance(len(batch))
    with pytest.warns(EpochWarning, match="epoch 0 continues with 3 samples not committed"):
        assert list(loader) == []
    sampler.set_epoch(1)
    assert len(list(loader)) == 2


@pytest.mark.parametrize("options", [{"shuffle": False}, {"partition": "strided"}])
def test_unshuffled_sampler_needs_no_set_epoch(options: dict[str, Any]) -> None:
    sampler = ranks(20, 2, **options)[0]
    assert list(sampler) == list(sampler)


def test_set_epoch_does_not_warn() -> None:
    sampler = ranks(20, 2)[0]
    orders = []
    for epoch in (0, 1, 1, 2):
        sampler.set_epoch(epoch)
        orders.append(list(DataLoader(range(20), sampler=sampler, batch_size=None)))
    assert orders[1] == orders[2]
    assert len({tuple(order) for order in orders}) == 3
    # Looking at a batch before the loop is no epoch.
    fresh = ranks(20, 2)[0]
    next(iter(fresh))
    assert len(list(fresh)) == 10


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"num_replicas": 2}, ValueError, "belong together"),
        ({"num_replicas": 2, "rank": 2}, ValueError, "rank 2 is out of range: 2 ranks"),
        ({"comm": SimpleNamespace(rank=0, size=1), "rank": 0}, ValueError, "not both"),
        ({"comm": object()}, TypeError, "must have a rank and a size"),
        ({"comm": 4}, TypeError, "a int has not.*num_replicas="),
        ({"seed": -1}, ValueError, "seed must be 0 or more"),
        ({"drop_last": True, "padding": True}, ValueError, "exclude each other"),
        ({"partition": "nice"}, ValueError, "unknown partitioner 'nice'; known: balanced"),
        ({"partition": 3}, TypeError, "a partitioner or one of"),
        ({"partition": "stratified"}, ValueError, "a range has no targets or labels"),
    ],
)
def test_wrong_arguments_are_rejected(arguments: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        PartitionSampler(range(10), **arguments)


def test_iterable_datasets_are_redirected() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def __len__(self) -> int:
            return 3

    with pytest.raises(TypeError, match="StreamPartition"):
        PartitionSampler(Stream())  # type: ignore[arg-type]  # wrong or narrower on purpose


def test_dataset_may_grow_between_epochs() -> None:
    data = list(range(5))
    sampler = PartitionSampler(data)
    assert len(list(sampler)) == 5
    data.append(5)
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(6))


def test_every_kind_of_dataset() -> None:
    for dataset in (TensorDataset(torch.arange(7)), Samples(7), "abcdefg", torch.arange(7)):
        assert sorted(PartitionSampler(dataset)) == list(range(7))
