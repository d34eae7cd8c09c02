"""Gradients that some ranks or all ranks lack, in `un.average_gradients`."""

from __future__ import annotations

import pytest
import torch
from failing_posts import FailedPostError, Posts, run_failing
from torch import nn

import unisono as un
from unisono.errors import CommError
from unisono.testing import pool


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_that_no_rank_has_stay_none(backend: str, size: int) -> None:
    assert pool(backend, 3).run(step, size=size) == [alone(size)] * size


def step(comm: un.Communicator) -> list[float | None]:
    used, partly, unused = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3))
    table = nn.Embedding(2, 1, sparse=True)
    optimizer = torch.optim.AdamW([used, partly, unused], lr=0.1, weight_decay=0.5)
    # The first optimizer of a process imports much.
    comm.barrier(timeout=60)
    for number in range(2):
        optimizer.zero_grad()
        loss = (used * (comm.rank + 1)).sum()
        if comm.rank == number:
            loss = loss + partly.sum()
        loss.backward()
        un.average_gradients(nn.ModuleList([nn.ParameterList([used, partly, unused]), table]), comm)
        optimizer.step()
    assert table.weight.grad is None
    return [None if p.grad is None else p.grad.item() for p in (used, partly, unused)] + [unused.item()]


def alone(size: int) -> list[float | None]:
    return [sum(range(1, size + 1)) / size, 1 / size, None, 1.0]


def test_embedding_with_a_norm_limit_is_named() -> None:
    """Its forward writes rows of the rank's own data, so that ranks drift apart."""
    with un.init() as comm:
        model = nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))
        with pytest.warns(UserWarning, match=r"writes '0\.weight' \(max_norm\)"):
            un.average_gradients(model, comm)
        model = nn.EmbeddingBag(4, 2, max_norm=1.0)
        with pytest.warns(UserWarning, match=r"writes 'weight' \(max_norm\)"):
            un.sharding.ShardedOptimizer(torch.optim.SGD, model, comm, shard_gradients=True, lr=0.1, elementwise=True)


def test_error_says_that_gradients_are_lost() -> None:
    def program(comm: un.Communicator, posts: Posts) -> None:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        un.average_gradients([weight], comm)
        if comm.rank == 1:
            # The comparison of gradients succeeds.
            posts[1] = 1
            with pytest.raises(FailedPostError):
                un.average_gradients([weight], comm)
        else:
            with pytest.raises(CommError) as caught:
                un.average_gradients([weight], comm)
            assert "which are lost now: compute them again" in "".join(caught.value.__notes__)

    run_failing(program, 2)
