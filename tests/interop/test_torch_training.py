"""Training as torch itself does it, on unisono: the same bits as on gloo for two ranks."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch_programs import LARGER
from torch_ranks import on_ranks

import unisono as un

Group = Any
Way = Callable[[Group], list[torch.Tensor]]


class Branches(nn.Module):
    """One of two branches is used at a time, another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, points: torch.Tensor, branch: int) -> torch.Tensor:
        hidden: torch.Tensor = (self.first, self.second)[branch](points)
        result: torch.Tensor = self.last(hidden.relu())
        return result


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(ddp: DistributedDataParallel, *extra: int, steps: int = 3) -> list[torch.Tensor]:
    """Every gradient of every step, and the weights in the end."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(batch(step), *extra).square().sum().backward()
        seen += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        optimizer.step()
    return [*seen, *(t.detach() for t in ddp.state_dict().values())]


def plain(group: Group) -> list[torch.Tensor]:
    return train(DistributedDataParallel(mlp(), process_group=group))


def several_buckets_as_views(group: Group) -> list[torch.Tensor]:
    model = DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    return train(model)


def unused_parameters(group: Group) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model = DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=True)
    return train(model, dist.get_rank() % 2)


def static_graph(group: Group) -> list[torch.Tensor]:
    return train(DistributedDataParallel(mlp(), process_group=group, static_graph=True))


def fp16_hook(group: Group) -> list[torch.Tensor]:
    model = DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=0.001)
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return train(model)


def hook_that_communicates_in_a_callback(group: Group) -> list[torch.Tensor]:
    """As PowerSGD's: what follows a collective is another one, which is waited for."""

    def again(future):
        summed = future.value()[0] / 4
        return dist.all_reduce(summed, group=group, async_op=True).get_future().wait()[0]

    # Torch refuses annotations that are text, as all are in this module.
    def hook(state, bucket):
        return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future().then(again)

    # Gloo's threads may end up waiting for each other here, so it gets one bucket.
    cap = 25 if dist.get_backend(group) == "gloo" else 0.001
    model = DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=cap)
    model.register_comm_hook(group, hook)
    return train(model)


def no_sync(group: Group) -> list[torch.Tensor]:
    model = DistributedDataParallel(mlp(), process_group=group)
    with model.no_sync():
        model(batch(5)).sum().backward()
    model(batch(6)).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def uneven_inputs(group: Group) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(8, 2), process_group=group)
    seen = []
    with model.join():
        for step in range(2 + 2 * dist.get_rank(group)):
            model(batch(step)).sum().backward()
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return seen


def embedding(group: Group) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Embedding(20, 4, sparse=True), process_group=group)
    model(torch.tensor([dist.get_rank(), 3, 3, 7])).square().sum().backward()
    return [p.grad.to_dense() for p in model.parameters() if p.grad is not None]


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        plain,
        several_buckets_as_views,
        unused_parameters,
        static_graph,
        fp16_hook,
        hook_that_communicates_in_a_callback,
        no_sync,
        uneven_inputs,
        embedding,
    )
}


def compare_and_die() -> tuple[list[dict[str, str]], str, str]:
    """For each way and rank, what is wrong with it. Then rank 1 dies in the middle of a step."""
    warnings.simplefilter("ignore")
    gloo = dist.new_group(backend="gloo")
    found = {}
    for name, way in {**WAYS, **LARGER}.items():
        expected, got = way(gloo), way(dist.group.WORLD)
        same = len(expected) == len(got) > 0 and all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        found[name] = "" if same else f"rank {dist.get_rank()}: gloo gives {expected}, unisono {got}"
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, found)
    model = DistributedDataParallel(mlp())
    loss = model(batch(0)).sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for call in (loss.backward, dist.barrier):
        with pytest.raises(RuntimeError) as caught:
            call()
        errors.append(str(caught.value))
    return everybodys, *errors


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], str, str]:
    survivor, dead = on_ranks(compare_and_die, 2, tmp_path_factory.mktemp("meet"), on_failure="continue")
    assert isinstance(dead, un.errors.PeerLostError)
    assert not isinstance(survivor, BaseException), survivor
    return survivor


@pytest.mark.parametrize("name", [*WAYS, *LARGER])
def test_the_same_bits_as_on_gloo(told: tuple[list[dict[str, str]], str, str], name: str) -> None:
    assert [found[name] for found in told[0]] == ["", ""]


def test_a_rank_that_dies_is_named_by_backward(told: tuple[list[dict[str, str]], str, str]) -> None:
    assert ["rank 1 was lost" in text for text in told[1:]] == [True, True]
