"""Training as torch itself does it, on unisono: the same bits as on gloo for two ranks."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
    """A hook like PowerSGD's, whose callback of a collective waits for another one."""

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


def uneven_inputs_by_ranks_that_remain(group: Group) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(8, 2), process_group=group)
    seen = []
    # Torch's C++ code keeps the number of ranks that remain, and waits for it when Python has dropped the work.
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + 2 * dist.get_rank(group)):
            model.zero_grad()
            model(batch(step)).sum().backward()
            gc.collect()
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
        uneven_inputs_by_ranks_that_remain,
        embedding,
    )
}


@dataclass
class Told:
    """Collected by rank 0: for each path and rank, its faults, and the error by which it learnt that rank 1 is dead.

    Attributes:
        errors: Of the step in which it died, and of the call after.
        within_s: From its death to the first of them.
        processes: Of both ranks.
    """

    differences: list[dict[str, str]]
    errors: list[str]
    within_s: float
    processes: list[int]


def dies(gradient: torch.Tensor) -> None:
    Path(os.environ["DIED_AT"]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def compare_and_die(folder: Path) -> Told:
    """Rank 1 dies in the middle of a step: some of its gradients have been sent, and some have not."""
    warnings.simplefilter("ignore")
    gloo = dist.new_group(backend="gloo")
    found = {}
    for name, way in {**WAYS, **LARGER}.items():
        expected, got = way(gloo), way(dist.group.WORLD)
        same = len(expected) == len(got) > 0 and all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        found[name] = "" if same else f"rank {dist.get_rank()}: gloo gives {expected}, unisono {got}"
    everybodys, processes = [None, None], [None, None]
    dist.all_gather_object(everybodys, found)
    dist.all_gather_object(processes, os.getpid())
    os.environ["DIED_AT"] = str(folder / "died at")
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.001)
    train(model)
    if dist.get_rank() == 1:
        next(model.parameters()).register_hook(dies)
    with pytest.raises(RuntimeError) as first:
        train(model)
    within_s = time.time() - float((folder / "died at").read_text())
    with pytest.raises(RuntimeError) as second:
        dist.barrier()
    return Told(everybodys, [str(first.value), str(second.value)], within_s, processes)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("meet")
    survivor, dead = on_ranks(compare_and_die, 2, folder, folder, on_failure="continue")
    assert isinstance(dead, un.errors.PeerLostError)
    assert not isinstance(survivor, BaseException), survivor
    return survivor


@pytest.mark.parametrize("name", [*WAYS, *LARGER])
def test_bitwise_equal_to_gloo(told: Told, name: str) -> None:
    assert [found[name] for found in told.differences] == ["", ""]


def test_backward_names_a_dead_rank_within_a_second(told: Told) -> None:
    assert ["rank 1 was lost" in text for text in told.errors] == [True, True]
    assert 0 < told.within_s < 1


def test_dead_rank_leaves_nothing_behind(told: Told) -> None:
    for process in told.processes:
        assert not Path(f"/proc/{process}").exists()
        # As a whole number: other libraries put hexadecimal digits into the names of their files.
        own = re.compile(rf"(?<![0-9a-f]){process}(?![0-9a-f])")
        assert [file.name for file in Path("/dev/shm").iterdir() if own.search(file.name)] == []
    assert [file.name for file in Path("/dev/shm").glob("*unisono*")] == []
