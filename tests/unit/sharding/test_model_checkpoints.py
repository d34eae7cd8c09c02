"""Checkpoints of sharded training: saved by p ranks, they go on equally on q ranks and unsharded, and the reverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_models import batch as batch_of
from sharded_models import loss_of, made
from torch import nn
from torch.optim import AdamW

import unisono as un
from unisono.sharding import ShardedModel, ShardedOptimizer

SAMPLES = 6
"""Batches of one step, over all ranks: a multiple of each number of ranks."""
KINDS = ("zero1", "zero2", "zero3", "plain")


def start(kind: str, comm: un.Communicator, seed: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return a model that training changes, its optimizer, and what is saved and loaded."""
    model = made("transformer")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * seed)
    options = {"lr": 0.01 * (1 + seed), "eps": 1e-3}
    # To try the class takes as long as the steps here.
    untried = {"elementwise": True}
    if kind == "zero3":
        sharded = ShardedModel(model, comm)
        optimizer = sharded.optimizer(AdamW, **options, **untried)
        return model, optimizer, {"model": sharded, "optimizer": optimizer}
    if kind != "zero2":
        un.GradientAverager(model, comm)
    if kind == "plain":
        optimizer: Any = AdamW(model.parameters(), **options)
    else:
        optimizer = ShardedOptimizer(
            AdamW, model, comm, shard_gradients=kind == "zero2", bucket_cap_mb=1e-3, **options, **untried
        )
    return model, optimizer, {"model": model, "optimizer": optimizer}


def steps(model: nn.Module, optimizer: Any, comm: un.Communicator, which: range) -> list[float]:
    losses = []
    for step in which:
        optimizer.zero_grad()
        mine = range(comm.rank, SAMPLES, comm.size)
        loss = torch.stack([loss_of(model, batch_of(sample, step)) for sample in mine]).mean()
        loss.backward()
        optimizer.step()
        losses.append(sum(comm.all_gather_object(loss.item())) / comm.size)
    return losses


def first(comm: un.Communicator, kind: str, path: str) -> list[float]:
    model, optimizer, state = start(kind, comm, 0)
    steps(model, optimizer, comm, range(1))
    un.checkpoint.save(path, state, comm)
    return steps(model, optimizer, comm, range(1, 3))


def second(comm: un.Communicator, kind: str, path: str) -> list[float]:
    model, optimizer, state = start(kind, comm, 1)
    un.checkpoint.load(path, state, comm)
    return steps(model, optimizer, comm, range(1, 3))


def check(folder: Path, saved: str, p: int, loaded: str, q: int) -> None:
    wanted = un.launch(first, p, "thread", (saved, str(folder)))[0]
    for found in un.launch(second, q, "thread", (loaded, str(folder))):
        assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-12, atol=0), (saved, loaded)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("zero1", "zero2"), ("zero2", "zero3"), ("zero3", "plain")],
)
def test_training_goes_on_equally(saved: str, loaded: str, tmp_path: Path) -> None:
    check(tmp_path, saved, 2, loaded, 3)


def test_training_goes_on_from_an_unsharded_checkpoint(tmp_path: Path) -> None:
    check(tmp_path, "plain", 1, "zero3", 2)


@pytest.mark.soak
@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("loaded", KINDS)
def test_training_goes_on_equally_on_any_ranks(saved: str, loaded: str, tmp_path: Path) -> None:
    for p, q in ((1, 3), (2, 1), (3, 2), (2, 6)):
        check(tmp_path / f"{p}-{q}", saved, p, loaded, q)
