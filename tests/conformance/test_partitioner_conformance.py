"""Every partitioner of the registry meets the checks, unasked; so do the samplers that use it."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unisono.data import PARTITIONERS, PartitionSampler
from unisono.testing.partitioners import Samples, check_partitioner, check_resume
from unisono.testing.samplers import check_epochs, check_global_order, check_ranks, check_states

NAMES = PARTITIONERS.names()
IN_TURNS = [name for name in NAMES if PARTITIONERS[name].interleaves]
SHUFFLING = [name for name in NAMES if PARTITIONERS[name].shuffles]
MOST = 17

counts = st.integers(0, 60) | st.integers(0, 3000) | st.sampled_from([99_999, 100_000])
fractions = (
    st.lists(st.integers(0, 1000), min_size=1, max_size=MOST)
    .filter(any)
    .map(lambda weights: [weight / sum(weights) for weight in weights])
)
equal = st.integers(1, MOST).map(lambda parts: [1 / parts] * parts)
paths = st.lists(st.integers(1, MOST), min_size=2, max_size=4)
kinds = st.sampled_from([1, 2, 10, 100])
FEW = max(3, settings.default.max_examples // 5)


@pytest.mark.parametrize("name", NAMES)
@given(count=counts, sizes=fractions | equal, seed=st.integers(0, 2**70), kinds=kinds)
@example(count=20_000, sizes=[1 / MOST] * MOST, seed=1234, kinds=10)
@example(count=10, sizes=[0.7, 0.2, 0.1], seed=1234, kinds=10)
@example(count=3, sizes=[0.1] * 10, seed=0, kinds=2)
@example(count=0, sizes=[1.0], seed=0, kinds=1)
@settings(max_examples=FEW)
def test_partition_conformance(name: str, count: int, sizes: list[float], seed: int, kinds: int) -> None:
    check_partitioner(PARTITIONERS[name].of, Samples(count, seed % 1000, kinds), sizes, seed)


@pytest.mark.parametrize("name", NAMES)
@given(count=counts, ranks=paths, data=st.data(), seed=st.integers(0, 2**70), kinds=kinds)
@settings(max_examples=FEW)
def test_resumes_on_another_number_of_ranks(
    name: str, count: int, ranks: list[int], data: st.DataObject, seed: int, kinds: int
) -> None:
    exact = st.floats(0, 1).map(lambda share: [share] * MOST)
    uneven = st.lists(st.floats(0, 1), min_size=MOST, max_size=MOST)
    taken = [data.draw(exact | uneven)[:parts] for parts in ranks[:-1]]
    check_resume(PARTITIONERS[name].of, Samples(count, seed % 1000, kinds), ranks, taken, seed, epoch=seed % 7)


@pytest.mark.parametrize("name", NAMES)
@given(count=st.integers(0, 200), ranks=paths, data=st.data())
@settings(max_examples=FEW)
def test_states_resume_on_another_number_of_ranks(name: str, count: int, ranks: list[int], data: st.DataObject) -> None:
    taken = [data.draw(st.lists(st.floats(0, 1), min_size=parts, max_size=parts)) for parts in ranks[:-1]]
    check_states(partial(PartitionSampler, partition=name), Samples(count), ranks, taken)


@pytest.mark.parametrize("name", IN_TURNS)
@given(count=st.integers(0, 200), ranks=paths, data=st.data())
@settings(max_examples=FEW)
def test_order_is_independent_of_the_number_of_ranks(
    name: str, count: int, ranks: list[int], data: st.DataObject
) -> None:
    done = [data.draw(st.integers(0, count)) for _ in ranks[:-1]]
    check_global_order(partial(PartitionSampler, partition=name), Samples(count), ranks, done)


@pytest.mark.parametrize("name", NAMES)
@given(count=st.integers(0, 300), ranks=st.integers(1, MOST))
@settings(max_examples=FEW)
def test_samplers_cover_the_dataset(name: str, count: int, ranks: int) -> None:
    check_ranks(partial(PartitionSampler, partition=name), Samples(count), ranks)


@pytest.mark.parametrize("shuffled", [50, 5000])
@pytest.mark.parametrize("name", SHUFFLING)
def test_epochs_differ_in_order(name: str, shuffled: int) -> None:
    check_epochs(partial(PartitionSampler, partition=name), Samples(shuffled))


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", range(1, MOST + 1))
def test_any_number_of_parts(name: str, parts: int) -> None:
    for count in (0, 1, parts - 1, parts, parts + 1, 1000, 100_000):
        check_partitioner(PARTITIONERS[name].of, Samples(count), [1 / parts] * parts, seed=parts)
        for other in range(1, MOST + 1):
            if count <= 1000:
                check_resume(PARTITIONERS[name].of, Samples(count), [parts, other], [[0.4] * parts], seed=other)


def test_partitioners_are_registered() -> None:
    assert {"contiguous", "strided", "shuffled", "weighted", "stratified", "dirichlet", "grouped", "balanced"} <= set(
        NAMES
    )
