"""State of a sampler, and resuming from it on other ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

import unisono as un
from unisono.data import PartitionSampler
from unisono.testing import run_ranks


def ranks(count: int, size: int, **options: Any) -> list[PartitionSampler]:
    return [PartitionSampler(range(count), num_replicas=size, rank=rank, **options) for rank in range(size)]


def merged(parts: Iterable[Iterable[int]]) -> list[int]:
    return sorted(chain.from_iterable(parts))


def rest(states: Any, count: int, size: int, **options: Any) -> list[int]:
    """All that the ranks of a new job give, after each has loaded the same; in turns."""
    samplers = ranks(count, size, **options)
    for sampler in samplers:
        sampler.load_state_dict(states)
    given = [list(sampler) for sampler in samplers]
    return [part[turn] for turn in range(max(map(len, given), default=0)) for part in given if turn < len(part)]


# -- progress --------------------------------------------------------------------------------------
def test_state_counts_consumed_samples() -> None:
    sampler = ranks(100, 2)[0]
    given = iter(sampler)
    fetched = [next(given) for _ in range(30)]
    sampler.advance(10)
    assert sampler.state_dict()["taken"] == 10
    assert list(sampler) == [*fetched[10:], *given]
    assert len(sampler) == 50


def test_state_is_plain_data() -> None:
    sampler = ranks(100, 3, partition=un.data.weighted([1, 2, 3]))[1]
    sampler.advance(7)
    assert json.loads(json.dumps(sampler.state_dict())) == sampler.state_dict()


@given(count=st.integers(0, 80), size=st.integers(1, 6), other=st.integers(1, 6), data=st.data())
def test_one_state_serves_ranks_in_step(count: int, size: int, other: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 5))
    most = -(-count // (size * batch))
    steps = data.draw(st.integers(0, most))
    samplers = ranks(count, size)
    done: list[int] = []
    for sampler in samplers:
        loop = iter(BatchSampler(sampler, batch, drop_last=False))
        for _, samples in zip(range(steps), loop, strict=False) if steps < most else enumerate(loop):
            sampler.advance(len(samples))
            done += samples
    whole = list(PartitionSampler(range(count)))
    for sampler in samplers:
        state = sampler.state_dict()
        if state["through"] is None:
            # One batch was all there was, and shorter than others, or not: its length is all that the sampler knows.
            assert len(sampler) < batch
            continue
        left = rest(state, count, other)
        assert sorted(done + left) == list(range(count))
        assert left == whole[len(done) :]


def test_rank_needs_the_states_of_all() -> None:
    samplers = ranks(10, 3)
    for sampler in samplers:
        given = iter(sampler)
        # As loader workers do, that fetch to the end before anything is trained on.
        list(given)
        for _ in range(len(sampler)):
            sampler.advance(1)
    with pytest.raises(
        ValueError, match=r"rank 2 had used all of its 3 samples.*rank 0 had used more of its 4.*all 3 ranks"
    ):
        ranks(10, 2)[0].load_state_dict(samplers[2].state_dict())
    assert rest(samplers[0].state_dict(), 10, 2) == []
    assert rest([sampler.state_dict() for sampler in samplers], 10, 2) == []


def test_unequal_parts_need_all_states() -> None:
    samplers = ranks(12, 2, partition=un.data.weighted([2, 1]))
    for sampler, count in zip(samplers, (4, 2), strict=True):
        sampler.advance(count)
    fresh = PartitionSampler(range(12), num_replicas=3, rank=0, partition=un.data.weighted([1, 1, 1]))
    before = fresh.state_dict()
    with pytest.raises(ValueError, match="at their own pace: load the states of all 2 ranks"):
        fresh.load_state_dict(samplers[0].state_dict())
    assert fresh.state_dict() == before
    left = rest([s.state_dict() for s in samplers], 12, 3, partition=un.data.weighted([1, 1, 1]))
    again = ranks(12, 2, partition=un.data.weighted([2, 1]))
    done = [*list(again[0])[:4], *list(again[1])[:2]]
    assert sorted(left + done) == list(range(12))


def test_each_rank_resumes_from_its_own_state() -> None:
    samplers = ranks(30, 3)
    expected = []
    for sampler, count in zip(samplers, (2, 7, 4), strict=True):
        expected.append(list(sampler)[count:])
        sampler.advance(count)
    resumed = ranks(30, 3)
    for sampler, old in zip(resumed, samplers, strict=True):
        sampler.load_state_dict(old.state_dict())
    assert [len(sampler) for sampler in resumed] == [8, 3, 6]
    assert [list(sampler) for sampler in resumed] == expected


def test_finished_epoch_stays_finished_after_load() -> None:
    sampler = ranks(10, 2)[0]
    sampler.set_epoch(4)
    sampler.advance(5)
    resumed = ranks(10, 2)[0]
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(4)
    assert list(resumed) == []
    resumed.set_epoch(5)
    assert len(list(resumed)) == 5


def test_state_stays_short_after_100_resumes() -> None:
    state = PartitionSampler(range(10**6)).state_dict()
    for turn in range(100):
        samplers = ranks(10**6, 1 + turn % 5)
        for sampler in samplers:
            sampler.load_state_dict(state)
            sampler.advance(7)
        state = samplers[0].state_dict()
    assert len(state["phases"]) == 1
    done = sum(7 * (1 + turn % 5) for turn in range(100))
    alone = PartitionSampler(range(10**6))
    alone.load_state_dict(state)
    assert len(alone) == 10**6 - done
    assert next(iter(alone)) == un.data.IndexShuffle(10**6)[done]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": 11}, "samples=11, and this one 10"),
        ({"partition": "Strided"}, "partition='Strided', and this one 'Shuffled'"),
        ({"shuffle": False}, "shuffle=False"),
        ({"format": 99}, "has format 99, but this sampler reads format 1"),
        ({"taken": 9}, "9 samples used by rank 0, which had 5|9 samples used by this rank, which has 5"),
    ],
)
def test_unrelated_state_is_rejected(change: dict[str, Any], said: str) -> None:
    state = {**ranks(10, 2)[0].state_dict(), **change}
    for size in (2, 3):
        with pytest.raises(ValueError, match=said):
            ranks(10, size)[0].load_state_dict(state)


def test_states_of_different_steps_are_rejected() -> None:
    early, late = ranks(10, 2)
    late.set_epoch(1)
    with pytest.raises(ValueError, match=r"must come from one job at one time: they have epoch \[0, 1\]"):
        ranks(10, 3)[0].load_state_dict([early.state_dict(), late.state_dict()])


def test_advancing_too_far_is_rejected() -> None:
    sampler = ranks(10, 2)[0]
    sampler.advance(4)
    with pytest.raises(ValueError, match="2 more samples: 1 of its 5 are left in epoch 0"):
        sampler.advance(2)


# -- other ranks in the middle ---------------------------------------------------------------------
def test_survivors_and_new_ranks_share_the_remaining_samples() -> None:
    before = ranks(40, 4)
    done = []
    for sampler, count in zip(before, (3, 2, 3, 3), strict=True):
        done += list(sampler)[:count]
        sampler.advance(count)
    # Rank 2 is lost; it is taken to have come as far as the others. A newcomer joins, and another.
    members = [before[0], before[1], before[3], *ranks(40, 5)[3:]]

    def follow(comm: Any) -> list[int]:
        members[comm.rank].rebuild(comm)
        return list(members[comm.rank])

    parts = run_ranks(follow, 5)
    assert merged([*parts, done]) == list(range(40))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_survivor_without_commits_is_not_new() -> None:
    before = ranks(40, 3)
    given = [list(sampler) for sampler in before]
    before[0].advance(3)
    before[2].advance(1)
    newcomer = PartitionSampler(range(40), num_replicas=3, rank=1)
    # Rank 0 is lost, which had come no further than the survivor that told most.
    states = [before[1].state_dict(), newcomer.state_dict(), before[2].state_dict()]
    parts = []
    for rank, sampler in enumerate((before[1], newcomer, before[2])):
        sampler.rebuild(SimpleNamespace(rank=rank, size=3), states=states)
        parts.append(list(sampler))
    assert merged([*parts, given[0][:1], given[2][:1]]) == list(range(40))


def test_one_state_may_serve_all() -> None:
    before = ranks(40, 2)
    given = [list(sampler) for sampler in before]
    before[0].advance(3)
    before[1].advance(2)
    states = [sampler.state_dict() for sampler in before]
    alone = before[1]
    alone.rebuild(SimpleNamespace(rank=0, size=1), like=1, states=states)
    assert sorted([*list(alone), *given[0][:2], *given[1][:2]]) == list(range(40))


def test_rank_in_the_next_epoch_advances_all() -> None:
    before = ranks(10, 2)
    before[0].set_epoch(1)
    before[1].advance(5)
    states = [sampler.state_dict() for sampler in before]
    for rank, sampler in enumerate(before):
        sampler.rebuild(SimpleNamespace(rank=rank, size=2), states=states)
    assert [sampler.epoch for sampler in before] == [1, 1]
    assert merged(before) == list(range(10))


def test_failed_rebuild_changes_nothing() -> None:
    sampler = PartitionSampler(range(12), num_replicas=2, rank=0, partition=un.data.weighted([2, 1]))
    sampler.advance(2)
    with pytest.raises(ValueError, match="2 weights for 3 parts"):
        sampler.rebuild(SimpleNamespace(rank=0, size=3))
    assert (sampler.num_replicas, sampler.state_dict()["taken"]) == (2, 2)
