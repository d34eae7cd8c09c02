"""Models that the program drops are freed with their communicators, and failed calls keep nothing alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from waiting import wait_until

import unisono as un
from unisono.errors import AbortedError
from unisono.sharding import ShardedModel, ShardedOptimizer
from unisono.testing import pool


def averaged(comm: un.Communicator, model: nn.Module) -> Any:
    # Small messages, so that some are copied by hooks, and a hook of the caller's, which the averager follows.
    un.GradientAverager(model, comm, bucket_cap_mb=0.0001)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    return SGD(model.parameters(), lr=0.1)


def zero_2(comm: un.Communicator, model: nn.Module) -> Any:
    return ShardedOptimizer(SGD, model, comm, shard_gradients=True, lr=0.1, elementwise=True)


def zero_3(comm: un.Communicator, model: nn.Module) -> Any:
    return ShardedModel(model, comm).optimizer(SGD, lr=0.1, elementwise=True)


def communicators() -> int:
    gc.collect()
    return sum(type(found) is un.Communicator for found in gc.get_objects())


def left_of(comm: un.Communicator, way: Callable[..., Any]) -> tuple[int, int]:
    """Return how many parameters and communicators are left of a model after two steps."""

    def train() -> list[weakref.ref[torch.Tensor]]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
        optimizer = way(comm, model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        return [weakref.ref(p) for p in model.parameters()]

    before = communicators()
    left = train()
    return communicators() - before, sum(p() is not None for p in left)


@pytest.mark.parametrize("way", [averaged, zero_2, zero_3])
def test_a_dropped_model_is_freed(way: Callable[..., Any]) -> None:
    # Ranks in processes of their own: the collector of a process works for one thread at a time.
    assert pool("shm", 2).run(left_of, way) == [(0, 0)] * 2


class Held:
    """Stands for a model or a tensor to which the frames of a failed call refer."""


@pytest.mark.parametrize("backend", ["thread", "shm", "tcp", "gloo"])
def test_an_aborted_communicator_keeps_nothing_of_the_calls_that_it_ended(backend: str) -> None:
    def program(comm: un.Communicator) -> tuple[bool, list[str | None]]:
        part = comm.dup()
        named: list[str | None] = []

        def call() -> weakref.ref[Held]:
            held = Held()
            works = [part.all_reduce(torch.ones(3), async_op=True) for _ in range(2)] if comm.rank == 0 else []
            comm.barrier()
            if comm.rank == 1:
                part.abort("on purpose")
            for work in works:
                with pytest.raises(AbortedError, match="on purpose") as raised:
                    work.wait()
                named.append(raised.value.operation)
            with pytest.raises(AbortedError, match="on purpose"):
                part.barrier()
            return weakref.ref(held)

        found = call()
        return wait_until(lambda: found() is None), named

    started = un.launch(program, 2, "thread") if backend == "thread" else pool(backend, 2).run(program)
    assert started == [(True, ["all_reduce"] * 2), (True, [])]
