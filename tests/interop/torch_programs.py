"""The larger parts of torch.distributed, each as a small program on any group."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["LARGER"]

Group = Any
Way = Callable[[Group], list[torch.Tensor]]


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        points = torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(points).square().sum().backward()
        optimizer.step()


def zero_redundancy_optimizer(group: Group) -> list[torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(mlp(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    train(model, optimizer)
    optimizer.consolidate_state_dict(0)
    return [p.detach() for p in model.parameters()]


def fsdp(group: Group) -> list[torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(mlp(), process_group=group, device_id=torch.device("cpu"))
    train(model, torch.optim.Adam(model.parameters(), lr=0.01))
    with FullyShardedDataParallel.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def fully_shard(group: Group) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = mlp(), DeviceMesh.from_group(group, "cpu")
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh)
    train(model, torch.optim.Adam(model.parameters(), lr=0.01))
    return [p.full_tensor().detach() for p in model.parameters()]


def dtensor(group: Group) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    rows = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    return [rows.full_tensor(), columns.to_local(), columns.redistribute(mesh, [Replicate()]).to_local()]


def checkpoint(group: Group) -> list[torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, group=group)
    state = {"model": mlp().state_dict(), "step": torch.tensor([7])}
    dcp.save(state, checkpoint_id=folder[0], process_group=group)
    empty = {"model": {k: torch.zeros_like(v) for k, v in mlp().state_dict().items()}, "step": torch.tensor([0])}
    dcp.load(empty, checkpoint_id=folder[0], process_group=group)
    return [*empty["model"].values(), empty["step"]]


def functional_collectives(group: Group) -> list[torch.Tensor]:
    import torch.distributed._functional_collectives as functional

    mine = torch.arange(4.0 * dist.get_world_size()).view(-1, 2) + dist.get_rank()
    results = [
        functional.all_reduce(mine, "sum", group),
        functional.all_gather_tensor(mine, 0, group),
        functional.reduce_scatter_tensor(mine, "sum", 0, group),
        functional.all_to_all_single(mine, None, None, group),
        functional.broadcast(mine, 1, group),
        *functional.all_reduce_coalesced([mine, mine * 2], "sum", group),
    ]
    return [functional.wait_tensor(t) for t in results]


LARGER: dict[str, Way] = {
    way.__name__: way
    for way in (zero_redundancy_optimizer, fsdp, fully_shard, dtensor, checkpoint, functional_collectives)
}
