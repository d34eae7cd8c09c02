"""What torch's own tools see of the backend, they see as on gloo: autograd's version counters, dispatch modes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_ranks import on_ranks

Call = tuple[str, list[torch.Tensor], Any]


def calls(group: Any) -> Iterator[Call]:
    """Collectives and messages of two ranks: a name, the tensors that are passed, and the call."""
    first = dist.get_rank() == 0

    def many() -> list[torch.Tensor]:
        return [torch.ones(4) for _ in range(2)]

    one, other, whole, half = torch.ones(4), torch.ones(4), torch.ones(8), torch.ones(2)
    given, taken = many(), many()
    sparse = torch.eye(3).to_sparse()
    yield "all_reduce", [one], lambda: dist.all_reduce(one, group=group)
    yield "all_reduce, asynchronous", [one], lambda: dist.all_reduce(one, group=group, async_op=True).wait()
    yield "all_reduce, sparse", [sparse], lambda: dist.all_reduce(sparse, group=group)
    yield "all_reduce_coalesced", given, lambda: dist.all_reduce_coalesced(given, group=group)
    yield "broadcast", [one], lambda: dist.broadcast(one, 0, group=group)
    yield "reduce", [one], lambda: dist.reduce(one, 0, group=group)
    yield "all_gather", [one, *taken], lambda: dist.all_gather(taken, one, group=group)
    yield "all_gather_single", [whole, one], lambda: dist.all_gather_into_tensor(whole, one, group=group)
    yield "gather", [one, *taken], lambda: dist.gather(one, taken if first else None, 0, group=group)
    yield "scatter", [one, *given], lambda: dist.scatter(one, given if first else None, 0, group=group)
    yield "reduce_scatter", [one, *given], lambda: dist.reduce_scatter(one, given, group=group)
    yield "reduce_scatter_single", [half, one], lambda: dist.reduce_scatter_tensor(half, one, group=group)
    yield "all_to_all", [*taken, *given], lambda: dist.all_to_all(taken, given, group=group)
    yield "all_to_all_single", [one, other], lambda: dist.all_to_all_single(one, other, group=group)
    for source in (0, None):
        yield (
            "a message",
            [one],
            lambda s=source: dist.send(one, 1, group) if first else dist.recv(one, s, group),
        )


def written(group: Any) -> list[object]:
    """Of each call, which of its tensors autograd takes for changed."""
    found: list[object] = []
    for name, tensors, call in calls(group):
        before = [t._version for t in tensors]
        call()
        found.append([name, *(t._version > was for t, was in zip(tensors, before, strict=True))])
    return found


def written_on_both() -> tuple[object, object]:
    return written(dist.group.WORLD), written(dist.new_group(backend="gloo"))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_autograd_notices_the_writes_that_it_notices_on_gloo(tmp_path: Path, transport: str) -> None:
    for ours, theirs in on_ranks(written_on_both, 2, tmp_path, transport=transport):
        assert ours == theirs


def trains_through_an_activation() -> float:
    y = torch.ones(2, requires_grad=True).relu()
    dist.all_reduce(y)
    y.sum().backward()
    return y.sum().item()


@pytest.mark.filterwarnings("ignore:c10d")
def test_activation_that_a_layer_saved_may_be_reduced(tmp_path: Path) -> None:
    assert on_ranks(trains_through_an_activation, 2, tmp_path) == [4.0, 4.0]
