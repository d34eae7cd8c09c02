"""Eight ranks, of which one dies, and then more: training continues within 3 s, with the result of an unbroken run."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
from small_training import Story, check, train
from training_tasks import TASKS

import unisono as un
from unisono.errors import CommError, PeerLostError
from unisono.testing import run_ranks

SIZE, LEFT, EPOCHS = 8, 2, 2
WITHIN_S, HANGS_S = 3.0, 5.0
JOBS = 20
"""Jobs whose ranks die until two are left: a hundred deaths and more."""


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_recovery_from_three_deaths_during_an_epoch(backend: str) -> None:
    deaths = {2: ("step", 15), 5: ("step", 30), 6: ("step", 30)}
    whole = run_ranks(train, SIZE, "thread", {}, EPOCHS, "digits")[0]
    ends = un.launch(train, SIZE, backend, (deaths, EPOCHS, "digits"), threads=1, on_failure="continue", timeout=20.0)
    stories = [end for end in ends if isinstance(end, Story)]
    assert len(stories) == SIZE - len(deaths), ends
    assert all(isinstance(ends[rank], PeerLostError) for rank in deaths)
    # Each sample is in exactly one committed step of each epoch, and the weights are those of one rank.
    check(stories, EPOCHS, "digits")
    assert len(stories[0].batches) > len(whole.batches)
    assert {left for story in stories for _, left in story.recoveries} == {7, 5}
    assert max(took for story in stories for took, _ in story.recoveries) < WITHIN_S
    task = TASKS["digits"]()
    assert task.accuracy(whole.weights) > 0.9
    assert abs(task.accuracy(stories[0].weights) - task.accuracy(whole.weights)) <= 0.01


def outlives(comm: Any, seed: int) -> list[float]:
    """Seconds from each error to the next right step. One rank after another dies, some while others recover."""
    draw, me, size = random.Random(seed), comm.rank, comm.size
    order = draw.sample(range(size), size - LEFT)
    early, delays = [draw.random() < 0.5 for _ in order], [draw.uniform(0.0, 0.03) for _ in order]
    armed: set[int] = set()
    took: list[float] = []

    def arm(number: int) -> None:
        if number < len(order) and order[number] == me and number not in armed:
            armed.add(number)
            threading.Timer(delays[number], os.kill, (os.getpid(), signal.SIGKILL)).start()

    model = torch.nn.Linear(4, 4)
    training = un.elastic.Recovery(comm, model=model, averager=un.GradientAverager(model, comm))
    failed_at, steps = None, 0
    while training.comm.size > LEFT or failed_at is not None:
        arm(size - training.comm.size)
        try:
            model(torch.ones(2, 4)).sum().backward()
            total = torch.ones(3)
            training.comm.all_reduce(total)
            assert total.tolist() == [training.comm.size] * 3
            steps += 1
            if steps % 5 == 0:
                training.comm.dup().close()
            training.commit()
        except CommError:
            failed_at = time.monotonic() if failed_at is None else failed_at
            if early[min(size - training.comm.size + 1, len(early) - 1)]:
                arm(size - training.comm.size + 1)
            faulthandler.dump_traceback_later(HANGS_S, file=sys.__stderr__)
            training.recover()
            faulthandler.cancel_dump_traceback_later()
            continue
        if failed_at is not None:
            took.append(time.monotonic() - failed_at)
            failed_at = None
    return took


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_recovery_time_is_bounded(backend: str) -> None:
    """Recover many times; print the threads of each rank if one takes too long."""
    for seed in range(JOBS):
        ends = un.launch(outlives, SIZE, backend, (seed,), threads=1, on_failure="continue", timeout=20.0)
        took = [found for found in ends if isinstance(found, list)]
        assert len(took) == LEFT, f"seed {seed}: {ends}"
        assert max(map(max, took)) < WITHIN_S, f"seed {seed}: {took}"
