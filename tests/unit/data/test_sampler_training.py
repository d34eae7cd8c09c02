"""Training that stops in the middle of an epoch and goes on with other ranks ends where an unbroken run does."""

from __future__ import annotations

import copy
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import unisono as un
from unisono.testing import run_ranks

POINTS = torch.randn(90, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(torch.arange(90), POINTS, (POINTS.sum(dim=1) > 0).long())
EPOCHS, BATCH = 2, 16
START = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def train(comm: un.Communicator, saved: dict[str, Any] | None, until: int) -> dict[str, Any]:
    """Some steps more; what a checkpoint would hold, and the samples of each step."""
    model = copy.deepcopy(START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = un.data.GlobalBatchSampler(DATA, comm, batch_size=BATCH)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        batches.load_state_dict(saved["batches"])
    averager = un.GradientAverager(model, comm)
    seen: list[list[int]] = []
    for epoch in range(batches.epoch, EPOCHS):
        if len(seen) == until:
            break
        batches.set_epoch(epoch)
        for indices, x, y in islice(DataLoader(DATA, batch_sampler=batches), until - len(seen)):
            optimizer.zero_grad()
            averager.weight(len(x))
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            batches.advance()
            seen.append(indices.tolist())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batches": batches.state_dict()}
    averager.remove()
    return {**copy.deepcopy(state), "seen": seen}


def steps_of(results: list[dict[str, Any]]) -> list[list[int]]:
    return [sorted(chain(*parts)) for parts in zip(*(result["seen"] for result in results), strict=True)]


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one["model"][name] - other["model"][name]).abs().max()) for name in one["model"])


@pytest.mark.parametrize(
    "stop", [pytest.param(1, marks=pytest.mark.soak), 4, pytest.param(6, marks=pytest.mark.soak), 9]
)
def test_result_equals_an_uninterrupted_run(stop: int) -> None:
    unbroken = run_ranks(train, 2, "thread", None, 1000)
    halfway = run_ranks(train, 2, "thread", None, stop)
    assert len(steps_of(halfway)) == stop
    assert len(steps_of(unbroken)) == 12
    for ranks in (1, 2, 3, 4):
        resumed = run_ranks(train, ranks, "thread", halfway[0], 1000)
        assert steps_of(halfway) + steps_of(resumed) == steps_of(unbroken)
        assert apart(resumed[0], unbroken[0]) < 1e-9
        if ranks == 2:
            assert apart(resumed[0], unbroken[0]) == 0


def lose_a_rank(comm: un.Communicator, dying: int) -> list[int]:
    """Take part in rounds of an epoch; one rank is lost in the third. What this rank has committed."""
    sampler = un.data.PartitionSampler(range(100), comm)
    committed: list[int] = []
    while len(sampler) > sampler.state_dict()["taken"]:
        batch = list(islice(sampler, 5))
        try:
            # When it returns, all have committed what came before.
            comm.barrier()
            if comm.rank == dying and len(committed) == 10:
                raise KeyError("lost")
            comm.barrier()
        except un.CommError:
            comm = comm.rebuild()
            dying = -1
            sampler.rebuild(comm)
            continue
        sampler.advance(len(batch))
        committed += batch
    return committed


def test_uncommitted_samples_of_a_lost_rank_are_reassigned() -> None:
    results = un.launch(lose_a_rank, 4, "thread", (2,), on_failure="continue", timeout=20)
    survivors = [samples for rank, samples in enumerate(results) if rank != 2]
    lost = list(un.data.PartitionSampler(range(100), num_replicas=4, rank=2))[:10]
    assert sorted(chain(lost, *survivors)) == list(range(100))
