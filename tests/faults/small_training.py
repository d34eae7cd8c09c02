"""A small training in which ranks die, and the same again on one rank, from what the survivors say that they did."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from training_tasks import TASKS, Task

import unisono as un

BATCH, RATE = 4, 0.05


@dataclass
class Story:
    """Report of a survivor.

    Attributes:
        batches: For each committed step, each rank's samples.
        recoveries: For each failure, seconds from the error to the first committed step after it; and ranks left.
    """

    batches: list[list[list[int]]] = field(default_factory=list)
    recoveries: list[tuple[float, int]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    rebuild_s: list[float] = field(default_factory=list)


class Momentum:
    """Gradient descent with momentum. Torch's own optimizer imports its compiler on first use, in each rank."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._speed = [torch.zeros_like(parameter) for parameter in self._parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, speed in zip(self._parameters, self._speed, strict=True):
            speed.mul_(0.9).add_(parameter.grad if parameter.grad is not None else 0.0)
            parameter.sub_(RATE * speed)
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"speed": [speed.clone() for speed in self._speed]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for speed, loaded in zip(self._speed, state["speed"], strict=True):
            speed.copy_(loaded)


def train(comm: Any, deaths: dict[int, tuple[str, float]], epochs: int = 1, of: str = "line") -> Story:
    """Train; rank r dies as `deaths` says: ("step", number) before that step, ("time", seconds) after the start."""
    me, story, failed_at = comm.rank, Story(), None
    task = TASKS[of]()
    model = task.model()
    optimizer = Momentum(model)
    sampler = un.data.PartitionSampler(range(len(task.inputs)), comm, seed=1)
    averager = un.GradientAverager(model, comm)
    training = un.elastic.Recovery(comm, model=model, optimizer=optimizer, averager=averager, sampler=sampler)
    how, when = deaths.get(me, ("never", 0.0))
    comm.barrier()
    if how == "time":
        threading.Timer(when, os.kill, (os.getpid(), signal.SIGKILL)).start()
    epoch = 0
    while epoch < epochs:
        sampler.set_epoch(epoch)
        try:
            for batches in rounds(training.comm, list(sampler)):
                if how == "step" and training.step >= when:
                    os.kill(os.getpid(), signal.SIGKILL)
                batch = batches[training.comm.rank]
                model.zero_grad()
                averager.weight(len(batch))
                task.loss(model, batch).backward()
                optimizer.step()
                training.commit(len(batch))
                story.batches[training.step - 1 :] = [batches]
                if failed_at is not None:
                    story.recoveries.append((time.monotonic() - failed_at, training.comm.size))
                    failed_at = None
            epoch += 1
        except un.CommError:
            failed_at = time.monotonic() if failed_at is None else failed_at
            before = training.step
            training.recover()
            story.rebuild_s.append(time.monotonic() - failed_at)
            if training.step > before:
                # Committed by another survivor: what was in it is known here, too.
                story.batches[before:] = [batches]
            epoch = sampler.epoch
    story.weights = [p for parameter in model.parameters() for p in parameter.reshape(-1).tolist()]
    return story


def rounds(comm: Any, mine: list[int]) -> Any:
    """For each step of what is left of the epoch, every rank's samples. Ranks may have one more or less."""
    everyone = comm.all_gather_object(mine)
    for start in range(0, max(len(each) for each in everyone), BATCH):
        yield [each[start : start + BATCH] for each in everyone]


def replayed(story: Story, task: Task) -> list[float]:
    """The weights of one rank that makes the same steps."""
    model = task.model()
    optimizer = Momentum(model)
    for batches in story.batches:
        task.loss(model, [index for batch in batches for index in batch]).backward()
        optimizer.step()
    return [p for parameter in model.parameters() for p in parameter.reshape(-1).tolist()]


def check(stories: Sequence[Story], epochs: int = 1, of: str = "line") -> None:
    """All survivors tell the same, each sample is in one step an epoch, and the weights are those of one rank."""
    first, task = stories[0], TASKS[of]()
    for story in stories:
        assert story.batches == first.batches
        assert story.weights == first.weights
    seen = Counter(index for batches in first.batches for batch in batches for index in batch)
    twice = {index: count for index, count in seen.items() if count != epochs}
    assert not twice, f"these samples are in another number of steps than {epochs}: {twice}"
    assert len(seen) == len(task.inputs), f"{len(task.inputs) - len(seen)} samples are in no step"
    weights, one_rank = (torch.tensor(found, dtype=torch.float64) for found in (first.weights, replayed(first, task)))
    torch.testing.assert_close(weights, one_rank, rtol=1e-9, atol=1e-9)
