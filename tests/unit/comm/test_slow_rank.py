"""A rank that holds up the others is named by `Communicator.metrics`, and no rank without a cause."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import pytest
import torch

import unisono as un
from unisono.testing import pool

STEP_S = 0.01
STEPS = 40
ROUNDS = 40
"""More than enough for samples that tell what a rank does."""

Straggler = dict[str, Any] | None


def steps(comm: un.Communicator, late: int | None, share: float, calls: int, seed: int) -> Straggler:
    """Steps of one length with some noise; the late rank takes longer."""
    chance = random.Random(f"{seed} {comm.rank}")
    for _ in range(STEPS):
        time.sleep(STEP_S * (1 + 0.05 * chance.random() + (share if comm.rank == late else 0.0)))
        for _ in range(calls):
            comm.all_reduce(torch.ones(4))
    found: Straggler = comm.metrics()["straggler"]
    return found


def named(ranks: int, late: int | None, share: float, calls: int = 1, seed: int = 0) -> Straggler:
    return un.simulate(steps, ranks, args=(late, share, calls, seed)).results[0]


# Two ranks have one other to compare with; more have a median.
@pytest.mark.parametrize(("ranks", "share"), [(2, 0.1), pytest.param(3, 0.05, marks=pytest.mark.soak), (4, 0.05)])
def test_late_rank_is_named_and_noise_names_none(ranks: int, share: float) -> None:
    found = named(ranks, ranks - 1, share, calls=3)
    assert found is not None
    assert found["rank"] == ranks - 1
    assert found["where"].startswith("all_reduce at test_slow_rank.py:")
    assert found["share"] == pytest.approx(share, abs=0.02)
    assert found["late_s"] == pytest.approx(STEPS * STEP_S * share, abs=STEPS * STEP_S * 0.02)
    assert named(ranks, None, 0.0, calls=3) is None


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_forty_late_ranks_are_named(ranks: int) -> None:
    # Two ranks need 8 % at the median. In as few steps, noise of 5 % hides a share of 10 % once in 70 runs.
    share = 0.12 if ranks == 2 else 0.05
    late = [named(ranks, seed % ranks, share, 1 + seed % 3, seed) for seed in range(40)]
    assert [found and found["rank"] for found in late] == [seed % ranks for seed in range(40)]
    assert [named(ranks, None, 0.0, 1 + seed % 3, seed) for seed in range(40)] == [None] * 40


def with_and_without_a_cause(comm: un.Communicator) -> list[int | None]:
    """The figures are those of the calls since the last time."""
    found = []
    for late in (0, None, 1):
        # As many as are looked at, so that none of those before are among them.
        for _ in range(100):
            time.sleep(STEP_S * (1.5 if comm.rank == late else 1.0))
            comm.barrier()
        straggler = comm.metrics()["straggler"]
        found.append(straggler and straggler["rank"])
    return found


def test_rank_that_has_recovered_is_not_named() -> None:
    assert un.simulate(with_and_without_a_cause, 2).results == [[0, None, 1]] * 2


def asynchronous(comm: un.Communicator) -> Straggler:
    """Calls that overlap the work of a step, which is longer on rank 1."""
    for _ in range(STEPS):
        works = []
        for _ in range(4):
            time.sleep(STEP_S / 4 * (1.2 if comm.rank == 1 else 1.0))
            works.append(comm.all_reduce(torch.ones(4), async_op=True))
        for work in works:
            work.wait()
    found: Straggler = comm.metrics()["straggler"]
    return found


def test_late_rank_is_named_where_calls_do_not_block() -> None:
    found = un.simulate(asynchronous, 3).results[0]
    assert found is not None
    assert found["rank"] == 1
    assert found["share"] == pytest.approx(0.17, abs=0.05)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(4)


def late_by_turns(comm: un.Communicator) -> list[tuple[int, str, str]]:
    """Train with one cause after the other, each until the figures tell what the late rank does."""
    comm.metrics()
    late_s = 0.006 if comm.rank == 1 else 0.0
    found: list[tuple[int, str, str]] = []
    for cause in ("computing", "in the loader", "computing"):
        for _ in range(ROUNDS):
            for batch in torch.utils.data.DataLoader(Samples(0.001 + (late_s if cause == "in the loader" else 0.0))):
                time.sleep(0.002 + (late_s if cause == "computing" else 0.0))
                comm.all_reduce(batch)
            straggler = comm.metrics()["straggler"]
            if straggler is not None and straggler["doing"] is not None:
                found.append((straggler["rank"], straggler["doing"], straggler["line"]))
                break
    return found


@pytest.mark.parametrize("backend", [pytest.param("thread", marks=pytest.mark.soak), "shm"])
def test_what_the_late_rank_does_now(backend: str) -> None:
    for found in pool(backend, 3).run(late_by_turns):
        assert [told[:2] for told in found] == [(1, "computing"), (1, "in the loader"), (1, "computing")]
        assert all(line.startswith("test_slow_rank.py:") for _, _, line in found)


def late_in_a_pair(comm: un.Communicator) -> tuple[int, str] | None:
    """Rank 0 waits in calls of another group, for a partner that is late there and in nothing else."""
    pair = comm.split(0 if comm.rank in (0, 3) else None)
    for _ in range(ROUNDS):
        for _ in range(30):
            if comm.rank == 3:
                time.sleep(0.006)
            if pair is not None:
                pair.barrier()
            if comm.rank != 3:
                time.sleep(0.002)
            comm.all_reduce(torch.ones(4))
        straggler = comm.metrics()["straggler"]
        if straggler is not None and straggler["doing"] is not None:
            return straggler["rank"], straggler["doing"]
    return None


def test_late_rank_is_in_a_collective_of_another_group() -> None:
    assert pool("thread", 4).run(late_in_a_pair) == [(0, "in a collective")] * 4


def test_late_rank_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def twice(comm: un.Communicator) -> None:
        for _ in range(2):
            steps(comm, 1, 0.2, 1, 0)

    with caplog.at_level(logging.WARNING, "unisono"):
        un.simulate(twice, 3)
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 1 holds up the others for 1")
    assert "before all_reduce at test_slow_rank.py:" in record.getMessage()


def test_few_calls_and_one_rank_have_no_straggler() -> None:
    alone = un.simulate(lambda comm: [comm.barrier(), comm.metrics()][1], 1).results[0]
    assert (alone["calls"], alone["straggler"]) == (1, None)
    with un.init() as comm:
        assert comm.metrics() == {"calls": 0, "seconds": 0.0, "outside_s": [0.0], "straggler": None}
