"""Periodic averaging among ranks of different speed: on simulated ranks, whose clock tells each wait exactly."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from pairwise import short

import unisono as un
from unisono.errors import AbortedError, CommError, MismatchError, PeerLostError
from unisono.gradients import DiLoCo, DivergenceGuard, PeriodicAverager, every
from unisono.testing import run_ranks

MESSAGE_S = 0.01
"""More than any exchange of these tests takes on the simulated network."""


def averager(
    weights: Sequence[torch.Tensor], comm: un.Communicator, every_s: float, max_lag: float | None = None, **options: Any
) -> DiLoCo:
    """Return a DiLoCo whose outer step is the mean itself, unless told otherwise."""
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
    schedule = every(timedelta(seconds=every_s), max_lag=max_lag)
    return DiLoCo(list(weights), comm, schedule, **{**plain, **options})


def train(
    comm: un.Communicator, step_s: Sequence[float], rounds: int, fragments: int = 1, **options: Any
) -> dict[str, Any]:
    """Take steps that add this rank's number and one, of so many seconds each, for some rounds."""
    weights = [torch.zeros(2, dtype=torch.float64) for _ in range(fragments)]
    speeds = averager(weights, comm, 10, fragments=fragments, **options)
    started = time.monotonic()
    while speeds.rounds < rounds:
        time.sleep(step_s[comm.rank])
        for weight in weights:
            weight += comm.rank + 1
        speeds.step()
    trained_s = time.monotonic() - started
    steps = speeds.steps
    speeds.finish()
    ended_s = time.monotonic() - started
    speeds.close()
    return {"steps": steps, "trained_s": trained_s, "ended_s": ended_s, "weights": torch.stack(weights)}


@short("fragments", [(1,), (2,), (3,)], [(3,)])
def test_a_rank_at_a_third_of_the_speed_costs_the_others_nothing(fragments: int) -> None:
    def rates(step_s: list[float]) -> list[float]:
        found = un.simulate(train, 3, args=(step_s, 8, fragments), kwargs={"overlap_steps": 3}).results
        return [each["steps"] / each["trained_s"] for each in found]

    calm = rates([1.0, 1.0, 1.0])
    slow = rates([1.0, 3.0, 1.0])
    assert slow[0] / calm[0] > 0.98
    assert slow[2] / calm[2] > 0.98
    # It is waited for by none, and waits for none.
    assert slow[1] == pytest.approx(calm[1] / 3, rel=0.02)


@pytest.mark.soak
def test_a_rank_at_a_third_of_the_speed_leaves_the_loss_as_it_is() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(4000, 6, generator=draw)
    targets = inputs.sin().sum(1, keepdim=True) + 0.2 * torch.randn(4000, 1, generator=draw)

    def loss(comm: un.Communicator, slow_s: float) -> float:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        speeds = DiLoCo(model, comm, timedelta(seconds=20), outer_momentum=0.5, fragments=2, overlap_steps=4)
        speeds.attach(optimizer := torch.optim.AdamW(model.parameters(), lr=1e-2))
        own = torch.Generator().manual_seed(comm.rank)
        while speeds.rounds < 100:
            time.sleep(slow_s if comm.rank == 1 else 1.0)
            batch = torch.randint(0, 3000, (32,), generator=own)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        speeds.finish()
        with torch.no_grad():
            return torch.nn.functional.mse_loss(model(inputs[3000:]), targets[3000:]).item()

    calm = un.simulate(loss, 3, args=(1.0,)).results
    slow = un.simulate(loss, 3, args=(3.0,)).results
    assert calm[0] < 0.1
    assert slow[0] == pytest.approx(calm[0], rel=0.02)


@short("fragments, overlap", product([1, 2], [0, 2]), [(1, 0), (2, 2)])
def test_ranks_are_equal_at_the_end(fragments: int, overlap: int) -> None:
    found = un.simulate(train, 3, args=([1.0, 2.5, 0.7], 4, fragments), kwargs={"overlap_steps": overlap}).results
    for each in found:
        assert torch.equal(each["weights"], found[0]["weights"])


def test_contributions_count_by_their_samples() -> None:
    samples = [[5, 3, 4], [1], [10, 20]]
    changes = [0.5, 7.0, -2.0]

    def program(comm: un.Communicator) -> float:
        weight = torch.zeros(1, dtype=torch.float64)
        speeds = averager([weight], comm, 60)
        for count in samples[comm.rank]:
            weight += changes[comm.rank]
            speeds.step(count)
        speeds.finish()
        return weight.item()

    given = [(sum(own), change * len(own)) for own, change in zip(samples, changes, strict=True)]
    wanted = sum(count * change for count, change in given) / sum(count for count, _ in given)
    assert un.simulate(program, 3).results == pytest.approx([wanted] * 3, rel=1e-15)


@pytest.mark.parametrize("fragments", [1, 2])
def test_ranks_of_one_speed_are_plain_diloco_bit_for_bit(fragments: int) -> None:
    source = np.random.default_rng(0)
    changes = torch.from_numpy(source.normal(size=(3, 40, 4, 5)))
    start = torch.from_numpy(source.normal(size=(4, 5)))

    def program(comm: un.Communicator, every: Any) -> torch.Tensor:
        weights = list(start.clone())
        diloco = DiLoCo(weights, comm, every, fragments=fragments)
        for change in changes[comm.rank]:
            time.sleep(1.0)
            for weight, one in zip(weights, change, strict=True):
                weight += one
            diloco.step()
        diloco.finish()
        return torch.stack(weights)

    # From the first step on ten seconds, less the time of messages: the eleventh, the twenty-first, ...
    timed = un.simulate(program, 3, args=(timedelta(seconds=10 - MESSAGE_S),)).results
    if fragments == 1:
        counted = un.simulate(counted_like_timed, 3, args=(start, changes, fragments)).results
        assert all(torch.equal(mine, counted[0]) for mine in timed)
    assert all(torch.equal(mine, timed[0]) for mine in timed)


def counted_like_timed(
    comm: un.Communicator, start: torch.Tensor, changes: torch.Tensor, fragments: int
) -> torch.Tensor:
    """Plain DiLoCo in the steps in which turns of ten seconds come, and at the end."""
    weights = list(start.clone())
    diloco = DiLoCo(weights, comm, lambda step: step in {11, 21, 31, 40}, fragments=fragments)
    for change in changes[comm.rank]:
        for weight, one in zip(weights, change, strict=True):
            weight += one
        diloco.step()
    return torch.stack(weights)


def test_a_straggler_is_waited_for_until_max_lag_and_continues_from_the_anchor() -> None:
    def program(comm: un.Communicator) -> list[tuple[float, float]]:
        weight = torch.zeros(1, dtype=torch.float64)
        speeds = averager([weight], comm, 10, max_lag=4)
        seen = []
        while speeds.rounds < 4:
            stalls = comm.rank == 1 and speeds.steps == 15
            time.sleep(28.0 if stalls else 1.0)
            weight += 1.0 if comm.rank == 0 else 100.0
            if speeds.step():
                seen.append((round(time.monotonic()), weight.item()))
        speeds.finish()
        return seen

    # Turns are due at 11, 21, 31 and 41 s; rank 1 is in one step from 15 to 43 s. Rank 0 waits for 4 s, and goes on
    # from what it has learnt alone.
    fast, slow = un.simulate(program, 2).results
    assert fast == [(11, 555.5), (25, 565.5), (35, 571.5), (43, 577.5)]
    assert slow == [(11, 555.5), (43, 577.5)]


def test_a_late_rank_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def program(comm: un.Communicator) -> int:
        weight = torch.zeros(1, dtype=torch.float64)
        speeds = averager([weight], comm, 10, max_lag=4)
        while speeds.rounds < 3:
            time.sleep(20.0 if comm.rank == 1 and speeds.steps == 15 else 1.0)
            speeds.step(32)
        speeds.finish()
        return speeds.missed

    assert un.simulate(program, 2).results == [0, 1]
    said = [record.message for record in caplog.records if record.name == "unisono"]
    assert said == ["rank 1 was more than 4 s late for exchange 1: its latest 128 samples do not count"]


def test_a_rank_that_stalls_for_many_intervals_is_no_failure() -> None:
    def program(comm: un.Communicator) -> tuple[int, float, float]:
        weight = torch.zeros(1, dtype=torch.float64)
        speeds = averager([weight], comm, 10, max_lag=2, overlap_steps=2)
        while speeds.rounds < 50:
            time.sleep(360.0 if comm.rank == 1 and speeds.steps == 25 else 1.0)
            weight += 1.0
            speeds.step()
        speeds.finish()
        return speeds.rounds, weight.item(), time.monotonic()

    results = un.simulate(program, 3, timeout=60).results
    assert len({weight for _, weight, _ in results}) == 1
    assert len({rounds for rounds, _, _ in results}) == 1
    # Waited for at each of some thirty exchanges; without it each took 10 s.
    assert results[0][2] < 640


def test_a_rank_without_more_samples_takes_part_until_all_have_finished() -> None:
    # It waits for the others' turns, which come less often than calls have to end.
    steps = [240, 40, 140]

    def program(comm: un.Communicator) -> tuple[float, float]:
        weight = torch.zeros(1, dtype=torch.float64)
        speeds = averager([weight], comm, 40, overlap_steps=1)
        for _ in range(steps[comm.rank]):
            time.sleep(1.0)
            weight += 1.0
            speeds.step()
        trained_s = time.monotonic()
        speeds.finish()
        return weight.item(), trained_s

    results = un.simulate(program, 3, timeout=5).results
    assert len({weight for weight, _ in results}) == 1
    assert [round(trained_s) for _, trained_s in results] == steps
    assert results[0][0] == pytest.approx(240, rel=0.05)


def test_a_schedule_of_the_outer_rate_is_one_on_all_ranks() -> None:
    def program(comm: un.Communicator) -> tuple[float, list[float]]:
        weight = torch.zeros(1, dtype=torch.float64)
        speeds = averager([weight], comm, 10, max_lag=1)
        assert speeds.outer is not None
        schedule = torch.optim.lr_scheduler.LambdaLR(speeds.outer, lambda count: 1 / (1 + count))
        anchors = []
        while speeds.rounds < 6:
            time.sleep(25.0 if comm.rank == 2 and speeds.steps == 15 else 1.0)
            weight += comm.rank + 1.0
            if speeds.step():
                schedule.step()
                anchors.append(speeds.anchor[0].item())
        speeds.finish()
        return weight.item(), anchors

    first, second, third = un.simulate(program, 3).results
    assert first == second
    assert first[0] == third[0]
    # It was late for two.
    assert len(third[1]) < len(first[1])
    assert set(third[1]) <= set(first[1])


def test_training_goes_on_after_finish() -> None:
    def program(comm: un.Communicator) -> list[float]:
        weight = torch.zeros(1, dtype=torch.float64)
        speeds = averager([weight], comm, 10)
        seen = []
        for _ in range(3):
            for _ in range(5):
                time.sleep(1.0 + comm.rank)
                weight += 1.0 + comm.rank
                speeds.step()
            speeds.finish()
            seen.append(weight.item())
            time.sleep(100.0)
        return seen

    results = un.simulate(program, 2).results
    assert results[0] == results[1] == [7.5, 15.0, 22.5]


def test_the_state_is_saved_and_loaded_between_intervals() -> None:
    changes = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 24)))

    def program(comm: un.Communicator, stop: bool) -> tuple[float, str]:
        weight = torch.zeros(1, dtype=torch.float64)
        speeds = DiLoCo([weight], comm, timedelta(seconds=4.5))
        said = ""
        for index, change in enumerate(changes[comm.rank].tolist()):
            time.sleep(1.0)
            weight += change
            speeds.step()
            if index == 11:
                with pytest.raises(RuntimeError, match=r"inside of an interval. Call finish\(\)") as refused:
                    speeds.state_dict()
                said = str(refused.value)
                speeds.finish()
                if stop:
                    state = copy.deepcopy(speeds.state_dict())
                    speeds.close()
                    speeds = DiLoCo([weight], comm, timedelta(seconds=4.5))
                    speeds.load_state_dict(state)
        speeds.finish()
        return weight.item(), said

    calm = un.simulate(program, 3, args=(False,)).results
    stopped = un.simulate(program, 3, args=(True,)).results
    assert calm == stopped
    assert len(set(calm)) == 1


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_lost_rank_is_named_and_the_others_go_on(fragments: int) -> None:
    def program(comm: un.Communicator) -> tuple[list[tuple[type[CommError], int | None]], int, torch.Tensor]:
        weights = [torch.zeros(2, dtype=torch.float64) for _ in range(fragments)]
        speeds = averager(weights, comm, 10, fragments=fragments, overlap_steps=1)
        mover = un.elastic.Recovery(comm, averager=speeds)
        lost = []
        while speeds.rounds < 8:
            try:
                time.sleep(1.0 + comm.rank / 4)
                if comm.rank == 1 and speeds.steps == 30:
                    raise KeyError("this rank is gone")
                for weight in weights:
                    weight += 1.0
                if speeds.step():
                    mover.commit()
            except CommError as error:
                lost.append((type(error), error.peer))
                mover.recover()
        speeds.finish()
        return lost, mover.comm.size, torch.stack(weights)

    ends = un.simulate(program, 3, on_failure="continue").results
    assert isinstance(ends[1], KeyError)
    for end in ends[0], ends[2]:
        assert end[:2] == ([(PeerLostError, 1)], 2)
        assert torch.equal(end[2], ends[0][2])
        # Rounds of some ten steps of one: neither lost nor counted twice.
        assert end[2][0, 0].item() == pytest.approx(80, abs=10)


class Failing(torch.optim.SGD):
    """An outer optimizer that fails if it is to step in another thread than this."""

    only: threading.Thread | None = None

    def step(self, closure: Any = None) -> None:
        if self.only not in (None, threading.current_thread()):
            raise KeyError("not here")
        super().step(closure)


def test_an_outer_optimizer_that_fails_in_a_missed_turn_ends_training_on_all_ranks() -> None:
    def program(comm: un.Communicator) -> None:
        speeds = averager([torch.zeros(1)], comm, 10, max_lag=1, outer=Failing)
        assert isinstance(speeds.outer, Failing)
        speeds.outer.only = threading.current_thread()
        for _ in range(99):
            time.sleep(60.0 if comm.rank == 1 and speeds.steps == 15 else 1.0)
            speeds.step()

    first, second = un.simulate(program, 2, on_failure="continue").results
    assert isinstance(first, AbortedError)
    assert "DiLoCo of rank 1 has failed in a turn: KeyError('not here')" in str(first)
    assert isinstance(second, KeyError)


def test_an_averager_that_is_dropped_ends_its_thread() -> None:
    def program(comm: un.Communicator) -> None:
        speeds = averager([torch.zeros(1)], comm, 60)
        speeds.step()
        threads = [each for each in threading.enumerate() if each.name == f"unisono DiLoCo rank {comm.rank}"]
        del speeds
        gc.collect()
        assert threads
        for each in threads:
            each.join()

    run_ranks(program, 1)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"reduce": "median"}, ValueError, r"every=timedelta\(...\) needs outer=.* and reduce='mean'"),
        ({"every": timedelta(0)}, ValueError, "every must be a positive number of seconds"),
    ],
)
def test_bad_arguments_send_nothing(options: dict[str, Any], error: type[Exception], said: str) -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(error, match=said):
            DiLoCo([torch.zeros(2)], comm, **{"every": timedelta(seconds=5), **options})
        comm.barrier()

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("n", "options", "said"),
    [
        (timedelta(seconds=5), {"max_lag": 0}, "max_lag must be a positive number of seconds"),
        (timedelta(seconds=5), {"warmup": 2}, "warmup= is a number of steps"),
        (timedelta(0), {}, "every must be a positive number of seconds"),
        (5, {"max_lag": 3}, "max_lag= is for ranks of different speed"),
    ],
)
def test_bad_times(n: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        every(n, **options)


def test_actions_by_steps_take_no_times() -> None:
    with un.init() as comm:
        for given in (timedelta(seconds=5), every(timedelta(seconds=5))):
            with pytest.raises(TypeError, match="every must be a number of steps, not"):
                DivergenceGuard([torch.zeros(2)], comm, given)  # type: ignore[arg-type]


def test_arguments_that_go_with_an_anchor_only() -> None:
    with un.init() as comm:
        with pytest.raises(ValueError, match="needs outer="):
            PeriodicAverager([torch.zeros(2)], comm, timedelta(seconds=5))
        with DiLoCo([torch.zeros(2)], comm, 5) as counted, pytest.raises(TypeError, match="pass a timedelta in every="):
            counted.step(samples=4)


def test_intervals_that_differ_are_named() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match="interval"):
            DiLoCo([torch.zeros(2)], comm, timedelta(seconds=5 + comm.rank))

    run_ranks(program, 2)


@pytest.mark.parametrize("backend", ["thread", pytest.param("shm", marks=pytest.mark.soak), "tcp"])
def test_with_real_time(backend: str) -> None:
    results = un.launch(real_training, 3, backend)
    assert len({result for result, _ in results}) == 1
    fast, slow, other = (steps for _, steps in results)
    assert slow < min(fast, other)


def real_training(comm: un.Communicator) -> tuple[float, int]:
    weight = torch.zeros(1, dtype=torch.float64)
    pause = torch.zeros(1)
    with averager([weight], comm, 0.1, fragments=1, overlap_steps=2) as speeds:
        while speeds.rounds < 3:
            # A wait of a known length: the other ranks' steps are a tenth of it.
            time.sleep(0.04 if comm.rank == 1 else 0.004)
            weight += 1 + pause.item()
            speeds.step()
        steps = speeds.steps
        speeds.finish()
    return weight.item(), steps
