"""Purpose of each partitioner, beyond the conformance checks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset

import unisono as un
from unisono.data import DataPartitioner, Partitioner, PartitionSampler
from unisono.data.partitions.balanced import deal_evenly, largest_first
from unisono.testing.partitioners import Samples, check_partitioner, check_resume

fractions = (
    st.lists(st.integers(0, 100), min_size=1, max_size=9).filter(any).map(lambda w: [weight / sum(w) for weight in w])
)


def loads(owners: torch.Tensor, costs: list[int], parts: int) -> list[int]:
    return [sum(cost for cost, owner in zip(costs, owners.tolist(), strict=True) if owner == p) for p in range(parts)]


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=7), parts=st.integers(1, 3))
def test_largest_first_meets_grahams_bound(costs: list[int], parts: int) -> None:
    best = min(max(loads(torch.tensor(owners), costs, parts)) for owners in product(range(parts), repeat=len(costs)))
    found = max(loads(largest_first(torch.tensor(costs), [1 / parts] * parts), costs, parts))
    assert best <= found <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9


@given(costs=st.lists(st.integers(0, 1000), max_size=80), parts=st.integers(1, 9))
def test_equal_counts_meet_the_stated_bound(costs: list[int], parts: int) -> None:
    owners, apart = deal_evenly(torch.tensor(costs, dtype=torch.float64), parts)
    counts = owners.bincount(minlength=parts).tolist() if costs else [0]
    assert max(counts) - min(counts) <= 1
    found = loads(owners, costs, parts)
    assert max(found) - min(found) <= apart


@pytest.mark.parametrize("method", ["largest_first", "same_count", "runs"])
@given(count=st.integers(0, 300), parts=st.integers(1, 17), taken=st.floats(0, 1), other=st.integers(1, 9))
def test_every_method_of_balancing(method: Any, count: int, parts: int, taken: float, other: int) -> None:
    def make(dataset: Any) -> Partitioner:
        return un.data.balanced(dataset.costs, method)

    check_partitioner(make, Samples(count), [1 / parts] * parts, seed=3)
    check_resume(make, Samples(count), [parts, other], [[taken] * parts], seed=3)


@given(count=st.integers(0, 200), sizes=fractions)
def test_contiguous_runs_of_any_shares(count: int, sizes: list[float]) -> None:
    check_partitioner(lambda data: un.data.balanced(data.costs, "runs"), Samples(count), sizes, seed=0)
    order = [int(sample) for part in DataPartitioner(range(count), sizes, partition="contiguous") for sample in part]
    assert order == list(range(count))


INNER = ["contiguous", "strided", "shuffled", "stratified", "dirichlet", "grouped", "balanced"]


@pytest.mark.parametrize("name", INNER)
@given(count=st.integers(0, 200), weights=st.lists(st.integers(0, 50), min_size=1, max_size=7).filter(any))
def test_weights_wrap_any_partitioner(name: str, count: int, weights: list[int]) -> None:
    def make(dataset: Any) -> Partitioner:
        return un.data.weighted(weights, un.data.PARTITIONERS[name].of(dataset))

    parts = len(weights)
    check_partitioner(make, Samples(count), [1 / parts] * parts, seed=1)
    lengths = [
        len(PartitionSampler(Samples(count), num_replicas=parts, rank=rank, partition=make(Samples(count))))
        for rank in range(parts)
    ]
    assert sum(lengths) == count
    if name not in ("grouped", "balanced", "stratified"):
        assert lengths == un.data.apportion(count, [weight / sum(weights) for weight in weights])


def test_dirichlet_alpha_controls_label_skew() -> None:
    labels = torch.arange(4000) % 10

    def largest_share(alpha: float) -> float:
        parts = DataPartitioner(labels, [0.1] * 10, 5, partition=un.data.dirichlet(labels, alpha)).partitions
        return sum(float(labels[part].bincount(minlength=10).max()) / len(part) for part in parts) / 10

    assert largest_share(1e-3) > 0.6
    assert largest_share(1e6) < 0.13
    assert largest_share(1e-3) > largest_share(1.0) > largest_share(1e6)


def test_sample_based_parts_are_equal_in_every_epoch() -> None:
    data = Samples(200)
    for name in ("stratified", "dirichlet", "grouped", "balanced"):
        sampler = PartitionSampler(data, num_replicas=3, rank=1, partition=name)
        first = list(sampler)
        sampler.set_epoch(1)
        second = list(sampler)
        assert sorted(first) == sorted(second)
        assert first != second


@pytest.mark.parametrize("name", un.data.PARTITIONERS.names())
def test_every_partitioner_divides_datasets(name: str) -> None:
    data = Samples(101)
    for sizes in ([1.0], [0.7, 0.2, 0.1], [1 / 3] * 3):
        parts = DataPartitioner(data, sizes, seed=7, partition=name)
        assert len(parts) == len(sizes)
        assert sorted(sample for part in parts for sample in part) == list(range(101))


def test_contiguous_parts_are_shuffled_internally() -> None:
    samplers = [
        PartitionSampler(range(30), num_replicas=3, rank=rank, partition="contiguous", shuffle=True)
        for rank in range(3)
    ]
    parts = [list(sampler) for sampler in samplers]
    assert [sorted(part) for part in parts] == [list(range(start, start + 10)) for start in (0, 10, 20)]
    assert all(part != sorted(part) for part in parts)
    assert [sample - 10 for sample in parts[1]] != parts[0]


def test_largest_group_may_be_the_whole_dataset() -> None:
    parts = [list(part) for part in DataPartitioner(range(5), [0.5, 0.5], partition=un.data.grouped("aaaaa"))]
    assert sorted(map(len, parts)) == [0, 5]


def test_known_values_may_have_any_type() -> None:
    for labels in (["b", "a"] * 5, [(1, 2), None] * 5, torch.tensor([7, -3] * 5), torch.tensor([True, False] * 5)):
        parts = DataPartitioner(range(10), [0.5, 0.5], partition=un.data.stratified(labels)).partitions
        assert [sorted((part % 2).tolist()).count(0) for part in parts] in ([2, 3], [3, 2])


def test_subsets_forward_dataset_attributes() -> None:
    whole = Samples(50)
    places = list(range(0, 50, 3))
    for subset in (Subset(whole, places), un.data.Partition(whole, places)):
        rule = un.data.stratified.of(subset)
        assert rule.fingerprint() == un.data.stratified(whole.targets[places]).fingerprint()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: un.data.balanced([1.0, -1.0]), "0 or more, but that of sample 1 is -1.0"),
        (lambda: un.data.balanced([float("nan")]), "finite"),
        (lambda: un.data.balanced([1.0], "best"), "largest_first, same_count, runs, not 'best'"),
        (lambda: un.data.balanced(torch.ones(2, 2)), r"one for each sample, but have the shape \(2, 2\)"),
        (lambda: un.data.grouped(torch.ones(2, 2)), r"one for each sample, but have the shape \(2, 2\)"),
        (lambda: un.data.dirichlet([0], alpha=0), "alpha must be finite and more than 0"),
        (lambda: un.data.weighted([0.0, 0.0]), "not all 0"),
        (lambda: un.data.weighted([1.0, float("inf")]), "finite"),
        (lambda: DataPartitioner(range(3), [1.0], partition=un.data.grouped([1])), "1 groups for 3 samples"),
        (lambda: DataPartitioner(range(3), [1.0], partition=un.data.weighted([1, 1])), "2 weights for 1 parts"),
        (lambda: DataPartitioner(range(3), [1.0], partition="balanced"), "a range has no costs or lengths"),
        (
            lambda: DataPartitioner(range(3), [0.6, 0.4], partition=un.data.balanced([1, 1, 1], "same_count")),
            "equal parts only",
        ),
    ],
)
def test_invalid_arguments_are_rejected(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_partitioners_are_found_by_name() -> None:
    assert un.data.strided is un.data.PARTITIONERS["strided"]
    assert not hasattr(un.data, "no_such_thing")
    assert {"strided", "PartitionSampler"} <= set(dir(un.data))


def test_partitioner_is_one_class() -> None:
    class EvensFirst(un.data.strided):
        def divide(self, samples: Any, shares: Any, seed: int) -> Any:
            return super().divide(samples, shares, seed)

    un.data.PARTITIONERS.register("evens_first", EvensFirst)
    try:
        assert list(PartitionSampler(range(4), num_replicas=2, rank=1, partition="evens_first")) == [1, 3]
    finally:
        un.data.PARTITIONERS.unregister("evens_first")
