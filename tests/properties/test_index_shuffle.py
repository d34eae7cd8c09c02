"""The shuffle of indices is a permutation of any size, looks like chance, and is the same everywhere."""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections import Counter
from itertools import permutations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from unisono.data import IndexShuffle, PartitionSampler, feistel

SIGMAS = 5.0
LARGE = [4097, 5000, 65_537, 10**6, 2**29 + 1, 10**9, 10**12, 2**62]
WRITTEN_DOWN = {
    8: [7, 6, 1, 4, 0, 5, 2, 3],
    10**9: [888107627, 515983815, 509009702, 965653161],
    2**62: [284383048843646689, 718067957240848497],
}


def excess(counts: torch.Tensor) -> float:
    """Return the chi-squared statistic of equally likely cells, in standard deviations from its mean."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def cells(values: torch.Tensor, count: int, number: int) -> torch.Tensor:
    return torch.bincount((values.double() / count * number).long().clamp(max=number - 1), minlength=number)


@given(count=st.integers(0, 20_000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
@example(count=4096, seed=0, epoch=0)
@example(count=4097, seed=0, epoch=0)
@example(count=2, seed=0, epoch=1)
@example(count=1, seed=0, epoch=0)
@example(count=0, seed=0, epoch=0)
def test_shuffle_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert IndexShuffle(count, seed, epoch).all().sort().values.equal(torch.arange(count))


@given(count=st.integers(1, 2**62), seed=st.integers(0, 2**70), data=st.data())
def test_indices_stay_distinct_for_any_size(count: int, seed: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=50, unique=True))
    shuffle = IndexShuffle(count, seed)
    found = shuffle.take(torch.tensor(places)).tolist()
    assert len(set(found)) == len(places)
    assert min(found) >= 0
    assert max(found) < count
    assert [shuffle[place] for place in places[:3]] == found[:3]


def plainly(count: int, seed: int, epoch: int, place: int) -> int:
    """The same in whole numbers of Python, which have no widths."""
    digest = hashlib.blake2b(repr([count, seed, epoch]).encode(), digest_size=64, person=b"unisono shuffle").digest()
    keys = struct.unpack("<16i", digest)
    bits = (count - 1).bit_length() // 2
    highs = -(-count >> bits)

    def signed(number: int) -> int:
        return (number + 2**31) % 2**32 - 2**31

    def mixed(half: int, turn: int) -> int:
        number = signed(keys[2 * turn] + half * 0x9E3779B1)
        return signed(keys[2 * turn + 1] + (number ^ (number >> 15)) * 0x2C1B3C6D)

    while True:
        high, low = divmod(place, 2**bits)
        for turn in range(0, 6, 2):
            low = (low + (mixed(high, turn) >> (32 - bits))) % 2**bits
            high = (high + ((mixed(low, turn + 1) + 2**31) * highs >> 32)) % highs
        place = high * 2**bits + low
        if place < count:
            return place


@given(count=st.integers(4097, 2**62), seed=st.integers(0, 2**70), epoch=st.integers(0, 99), place=st.integers(0, 4096))
@example(count=4097, seed=0, epoch=0, place=4096)
@example(count=2**62, seed=1, epoch=1, place=1)
def test_shuffle_equals_plain_arithmetic(count: int, seed: int, epoch: int, place: int) -> None:
    places = [place, count - 1 - place]
    found = IndexShuffle(count, seed, epoch).take(torch.tensor(places)).tolist()
    assert found == [plainly(count, seed, epoch, one) for one in places]


def test_shuffle_is_platform_independent() -> None:
    # Written down once, so that another platform or version that disagrees is found.
    assert list(IndexShuffle(8, seed=1)) == WRITTEN_DOWN[8]
    assert IndexShuffle(10**9, seed=1, epoch=2).take(torch.arange(4)).tolist() == WRITTEN_DOWN[10**9]
    assert IndexShuffle(2**62, seed=2**70).take(torch.arange(2)).tolist() == WRITTEN_DOWN[2**62]


def test_seeds_epochs_and_counts_differ_in_order() -> None:
    for count in (50, 10**4, 10**9):
        given = [(count, 0, 0), (count, 1, 0), (count, 0, 1), (count, 1, 1), (count, 2**64, 0), (count + 1, 0, 0)]
        orders = [tuple(IndexShuffle(*arguments).take(torch.arange(40)).tolist()) for arguments in given]
        assert len(set(orders)) == len(given)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_permutations_are_equally_likely(count: int) -> None:
    seen = Counter(tuple(IndexShuffle(count, seed)) for seed in range(20 * math.factorial(count)))
    assert excess(torch.tensor([seen[order] for order in permutations(range(count))]).double()) < SIGMAS


@pytest.mark.parametrize("count", LARGE)
def test_neighbours_are_uncorrelated(count: int) -> None:
    for seed in range(3):
        number = min(count, 100_000)
        found = IndexShuffle(count, seed).take(torch.arange(number))
        steps = (found[1:] - found[:-1]).remainder(count)
        assert excess(cells(steps, count, 64).double()) < SIGMAS
        pairs = (found[1:].double() / count * 16).long() * 16 + (found[:-1].double() / count * 16).long()
        assert excess(torch.bincount(pairs, minlength=256).double()) < SIGMAS
        bits = found[1:] % 8 * 8 + found[:-1] % 8
        assert excess(torch.bincount(bits, minlength=64).double()) < SIGMAS


@pytest.mark.parametrize("count", [10**6, 10**9, 10**12])
def test_prefix_is_a_fair_sample(count: int) -> None:
    # Also of every 2^k-th place, which have a half of their bits in common.
    for stride in (1, 8, 1 << ((count - 1).bit_length() // 2)):
        places = torch.arange(0, min(count, 50_000 * stride), stride)
        assert excess(cells(IndexShuffle(count, 7).take(places), count, 50).double()) < SIGMAS


@pytest.mark.parametrize("count", [5000, 10**9])
def test_any_index_can_be_at_any_position(count: int) -> None:
    found = torch.stack([IndexShuffle(count, seed).take(torch.tensor([0, 1, count // 2])) for seed in range(700)])
    for column in found.T:
        assert excess(cells(column, count, 16).double()) < SIGMAS
    assert excess(cells((found[:, 1] - found[:, 0]).remainder(count), count, 16).double()) < SIGMAS


def singles(count: int, seeds: int) -> tuple[float, float]:
    """Standard deviations from 1 of the mean numbers of samples that stay, and of neighbours that stay neighbours."""
    orders = [IndexShuffle(count, seed).all() for seed in range(seeds)]
    stays = sum(int((order == torch.arange(count)).sum()) for order in orders)
    follows = sum(int((order[1:] == order[:-1] + 1).sum()) for order in orders)
    return abs(stays - seeds) / math.sqrt(seeds), abs(follows - seeds) / math.sqrt(seeds)


def test_neighbours_stay_together_as_rarely_as_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(singles(4500, 200)) < SIGMAS
    # Four rounds are too few, and this tells.
    monkeypatch.setattr(feistel, "_DOUBLE_ROUNDS", 2)
    assert max(singles(4500, 200)) > SIGMAS


def test_global_generators_are_unchanged() -> None:
    before = random.getstate(), torch.get_rng_state()
    IndexShuffle(100).all()
    IndexShuffle(10**9).take(torch.arange(100))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        for count in (10, 10**6):
            assert len(set(IndexShuffle(count, 1).take(torch.arange(10, device="cpu")).tolist())) == 10
        assert sorted(PartitionSampler(range(10))) == list(range(10))


def test_wrong_numbers_are_rejected() -> None:
    for arguments in ((-1,), (1, -1), (1, 0, -1)):
        with pytest.raises(ValueError, match="must be 0 or more, but is -1"):
            IndexShuffle(*arguments)
    with pytest.raises(ValueError, match=r"at most 2\^62"):
        IndexShuffle(2**62 + 1)
    with pytest.raises(TypeError):
        IndexShuffle(1.5)  # type: ignore[arg-type]  # wrong or narrower on purpose
    with pytest.raises(IndexError, match="10 samples"):
        IndexShuffle(10)[10]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_billion_samples_are_divided_exactly(ranks: int) -> None:
    count = 10**9
    samplers = [PartitionSampler(range(count), num_replicas=ranks, rank=rank) for rank in range(ranks)]
    assert sum(map(len, samplers)) == count
    assert {len(sampler) for sampler in samplers} <= {count // ranks, -(-count // ranks)}
    # In turns, and each rank's last is one of the last places of the order: so each place is one rank's.
    order = IndexShuffle(count)
    for rank, sampler in enumerate(samplers):
        given = iter(sampler)
        assert [next(given) for _ in range(20)] == order.take(torch.arange(rank, 20 * ranks, ranks)).tolist()
        sampler.advance(len(sampler) - 1)
        assert list(sampler) == [order[rank + (len(sampler) - 1) * ranks]]


@pytest.mark.soak
@pytest.mark.parametrize("count", [2**24 + 1, 10**8])
def test_large_shuffles_are_permutations(count: int) -> None:
    seen = torch.zeros(count, dtype=torch.bool)
    shuffle = IndexShuffle(count, seed=5)
    for start in range(0, count, 1 << 20):
        seen[shuffle.take(torch.arange(start, min(count, start + (1 << 20))))] = True
    assert bool(seen.all())
