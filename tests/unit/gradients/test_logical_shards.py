"""Steps of LogicalShards that fail on one rank: gradients are as before, and nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from failing_posts import FailedPostError, Posts, run_failing
from pairwise import short
from torch.utils._python_dispatch import TorchDispatchMode

import unisono as un
from unisono.errors import CommError
from unisono.gradients import LogicalShards
from unisono.testing import run_ranks


class Model(torch.nn.Module):
    """Parameters of two dtypes, which travel in two messages, one that no shard uses, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(2))
        self.second = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.unused = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(1))
        for number, p in enumerate(self.parameters()):
            p.grad = torch.full_like(p, 10.0 * number)

    def gradients(self) -> list[list[float]]:
        return [[] if p.grad is None else p.grad.tolist() for p in self.parameters()]


BEFORE = [[0.0, 0.0], [10.0, 10.0], [20.0, 20.0]]


def after(count: int, steps: int) -> list[list[float]]:
    """Return the gradients after some steps."""
    total = steps * (count - 1) / 2
    return [[total, total], [10 + total, 10 + total], [20.0, 20.0]]


def run_shards(shards: LogicalShards, model: Model, numbers: Iterable[int]) -> None:
    for number in numbers:
        with shards.shard(number):
            (model.first.sum() * number).backward()
            (model.second.sum() * number).backward()


def repeat_failed_step(comm: un.Communicator, posts: Posts, count: int, before: int) -> tuple[bool, Any, Any]:
    """Let rank 1 fail after some posts; return whether this rank did, and p.grad then and after another step."""
    model = Model()
    owned = [p.grad for p in model.parameters()]
    shards = LogicalShards(model, comm, count, broadcast_buffers=True)
    if comm.rank == 1:
        posts[1] = before
    failed = False
    try:
        run_shards(shards, model, shards.local)
    except (FailedPostError, CommError):
        failed = True
    kept = model.gradients()
    shards.move_to(comm)
    run_shards(shards, model, shards.local)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), owned, strict=True))
    assert shards.state_dict() == {"steps": 2 - failed}
    return failed, kept, model.gradients()


# Six shards on three ranks are not summed in one subtree for each rank, so the ranks gather partial sums.
SIZES = [(2, 4), (3, 6)]


@short("size, count, before", [(*size, n) for size, n in product(SIZES, range(4))], [(2, 4, 2), (2, 4, 3), (3, 6, 3)])
def test_failed_averaging_leaves_gradients_as_before_the_step(size: int, count: int, before: int) -> None:
    found = run_failing(repeat_failed_step, size, count, before)
    assert found[1][0]
    for failed, kept, gradients in found:
        # The last message may have reached another rank before rank 1 has failed.
        assert kept == (BEFORE if failed else after(count, 1))
        assert gradients == after(count, 2 - failed)


@pytest.mark.parametrize("end", [LogicalShards.remove, lambda shards: shards.move_to(un.init("thread"))])
def test_incomplete_step_is_undone_when_its_averager_ends(end: Callable[[LogicalShards], None]) -> None:
    model = Model()
    with un.init("thread") as comm:
        shards = LogicalShards(model, comm, 4)
        run_shards(shards, model, [2, 0])
        end(shards)
        assert model.gradients() == BEFORE
        shards.remove()


class NoMemory(TorchDispatchMode):
    """Raises in the n-th addition."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


# Shard 3 completes two subtrees of two gradients each.
@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_shard_that_could_not_be_added_is_repeated(left: int) -> None:
    def program(comm: un.Communicator) -> list[list[float]]:
        model = Model()
        shards = LogicalShards(model, comm, 4)
        run_shards(shards, model, [0, 2, 1])
        with pytest.raises(torch.OutOfMemoryError), NoMemory(left):
            run_shards(shards, model, [3])
        run_shards(shards, model, [3])
        return model.gradients()

    assert run_ranks(program, 1) == [after(4, 1)]
