"""The partitioner loses nothing, whatever the fractions; its parts are sequences and torch datasets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from unisono.data import DataPartitioner, Partition
from unisono.testing.partitioners import check_division, check_seed

THIRDS = [1 / 3, 1 / 3, 1 / 3]

fractions = (
    st.lists(st.integers(0, 1000), min_size=1, max_size=12)
    .filter(any)
    .map(lambda weights: [weight / sum(weights) for weight in weights])
)


@given(count=st.integers(0, 200), sizes=fractions, seed=st.integers(0, 2**70))
@example(count=10, sizes=[0.7, 0.2, 0.1], seed=1234)
@example(count=10, sizes=THIRDS, seed=1234)
@example(count=100, sizes=[0.29, 0.71], seed=0)
@example(count=3, sizes=[0.1] * 10, seed=0)
@example(count=0, sizes=[0.5, 0.5], seed=0)
def test_no_sample_is_lost(count: int, sizes: list[float], seed: int) -> None:
    check_division(DataPartitioner, count, sizes, seed)


def test_seed_changes_the_order() -> None:
    check_seed(DataPartitioner)


def test_partitions_of_many_ranks() -> None:
    check_division(DataPartitioner, 1009, [1 / 97] * 97, seed=0)


def test_order_is_the_same_everywhere() -> None:
    # Written down once, so that another platform or version that disagrees is found.
    assert list(DataPartitioner(range(8), sizes=[0.5, 0.5], seed=1234).use(0)) == [2, 7, 1, 5]


def test_equal_remainders_go_to_the_first() -> None:
    assert [len(part) for part in DataPartitioner(range(11), THIRDS).partitions] == [4, 4, 3]
    assert [len(part) for part in DataPartitioner(range(5)).partitions] == [4, 1, 0]


def test_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        part = DataPartitioner(range(10)).use(0)
    assert len(list(part)) == 7
    assert part.indices.device.type == "cpu"


@given(indices=st.lists(st.integers(0, 25), max_size=8), bounds=st.tuples(*[st.none() | st.integers(-9, 9)] * 2))
@pytest.mark.parametrize("step", [None, 1, 2, -1, -3])
def test_partition_is_a_sequence(indices: list[int], bounds: tuple[int | None, int | None], step: int | None) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    expected = [letters[index] for index in indices]
    part = Partition(letters, indices)
    assert list(part) == expected
    assert [part[place] for place in range(-len(part), len(part))] == expected * 2
    cut = part[slice(*bounds, step)]
    assert isinstance(cut, Partition)
    assert list(cut) == expected[slice(*bounds, step)]
    for place in (len(part), -len(part) - 1):
        with pytest.raises(IndexError, match=f"{len(part)} samples"):
            part[place]


def test_partition_is_a_torch_dataset() -> None:
    part = DataPartitioner(torch.arange(10), sizes=[1.0]).use(0)
    assert isinstance(part, Dataset)
    assert sorted(torch.cat(list(DataLoader(part, batch_size=3))).tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([0.7, 0.2], "sum to 1, but .* sum to 0.9;"),
        ([7, 2, 1], "sum to 10; divide"),
        ([], "sum to 0;"),
        ([1.5, -0.5], "fractions from 0 to 1"),
        ([math.nan, 1.0], "fractions from 0 to 1"),
        ([math.inf], "fractions from 0 to 1"),
    ],
)
def test_wrong_sizes_are_rejected(sizes: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataPartitioner(range(10), sizes)


@pytest.mark.parametrize("rank", [-1, 3])
def test_wrong_rank_is_rejected(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} has no part: sizes name 3"):
        DataPartitioner(range(10)).use(rank)


def test_wrong_seed_and_data_are_rejected() -> None:
    with pytest.raises(ValueError, match="seed must be 0 or more"):
        DataPartitioner(range(10), seed=-1)
    with pytest.raises(TypeError):
        DataPartitioner(range(10), seed=0.5)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="pass a dataset with a length"):
        DataPartitioner(iter(range(10)))  # type: ignore[arg-type]  # wrong on purpose
