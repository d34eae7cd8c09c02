"""The larger parts of torch.distributed, each as a small program on any group."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def shared_folder(group: Group) -> Iterator[str]:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, group=group)
    yield folder[0]
    dist.barrier(group)
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def checkpoint(group: Group) -> list[torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    state = {"model": mlp().state_dict(), "step": torch.tensor([7])}
    empty = {"model": {k: torch.zeros_like(v) for k, v in mlp().state_dict().items()}, "step": torch.tensor([0])}
    with shared_folder(group) as folder:
        dcp.save(state, checkpoint_id=folder, process_group=group)
        dcp.load(empty, checkpoint_id=folder, process_group=group)
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


def functional_collectives_with_a_derivative(group: Group) -> list[torch.Tensor]:
    import torch.distributed._functional_collectives as functional

    ranks = dist.get_world_size()
    gradients = []
    for call in (
        lambda t: functional.all_gather_tensor_autograd(t, 0, group),
        lambda t: functional.reduce_scatter_tensor_autograd(t, "sum", 0, group),
        lambda t: functional.all_to_all_single_autograd(t, [2] * ranks, [2] * ranks, group),
    ):
        mine = torch.arange(4.0 * ranks).view(-1, 2).requires_grad_()
        (call(mine) * (dist.get_rank() + 1)).sum().backward()
        assert mine.grad is not None
        gradients.append(mine.grad)
    return gradients


def collectives_with_a_derivative(group: Group) -> list[torch.Tensor]:
    import torch.distributed.nn.functional as differentiable

    ranks, results = dist.get_world_size(), []
    for call in (
        lambda t: differentiable.all_reduce(t, group=group),
        lambda t: torch.stack(differentiable.all_gather(t, group=group)),
        lambda t: differentiable.broadcast(t, 0, group=group),
        lambda t: torch.stack(differentiable.gather(t, 0, group=group)),
        lambda t: differentiable.reduce_scatter(torch.empty(4), [t * i for i in range(ranks)], group=group),
        lambda t: torch.stack(
            differentiable.all_to_all([torch.empty(4) for _ in range(ranks)], [t * i for i in range(ranks)], group)
        ),
    ):
        mine = (torch.arange(4.0) + dist.get_rank()).requires_grad_()
        (call(mine) * (dist.get_rank() + 1)).sum().backward()
        assert mine.grad is not None
        results.append(mine.grad)
    return results


def power_sgd_hook(group: Group) -> list[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = nn.parallel.DistributedDataParallel(mlp(), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(2):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [p.detach() for p in model.parameters()]


def local_sgd(group: Group) -> list[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = nn.parallel.DistributedDataParallel(mlp(), process_group=group)
    alone, _ = dist.new_subgroups(group_size=1, backend=dist.get_backend(group))
    state = post_localSGD_hook.PostLocalSGDState(group, alone, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1, process_group=group)
    train(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager))
    return [p.detach() for p in model.parameters()]


def uneven_inputs_of_a_sharded_optimizer(group: Group) -> list[torch.Tensor]:
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(mlp(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    with Join([model, optimizer]):
        for _ in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def sharded_checkpoint(group: Group) -> list[torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    def sharded(seed: int) -> FullyShardedDataParallel:
        torch.manual_seed(seed)
        # Fewer rows than ranks: one rank has no part of it, and is queried for its device.
        layer = nn.Linear(8, 1, bias=False)
        made = FullyShardedDataParallel(layer, process_group=group, device_id=torch.device("cpu"))
        FullyShardedDataParallel.set_state_dict_type(made, StateDictType.SHARDED_STATE_DICT)
        return made

    model, other = sharded(1), sharded(2)
    with shared_folder(group) as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder, process_group=group)
    other.load_state_dict(state["model"])
    found = []
    for each in (model, other):
        with FullyShardedDataParallel.summon_full_params(each):
            found.append(torch.cat([p.detach().flatten().clone() for p in each.parameters()]))
    assert torch.equal(*found)
    return found


def checkpoint_in_the_background(group: Group) -> list[torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    state = {"model": mlp().state_dict()}
    empty = {"model": {k: torch.zeros_like(v) for k, v in state["model"].items()}}
    with shared_folder(group) as folder:
        dcp.async_save(state, checkpoint_id=folder, process_group=group).result()
        dcp.load(empty, checkpoint_id=folder, process_group=group)
    return list(empty["model"].values())


def tensor_parallel(group: Group) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = mlp(), DeviceMesh.from_group(group, "cpu")
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    result = model(torch.ones(3, 8))
    result.sum().backward()
    return [result.detach(), model[0].weight.grad.full_tensor()]


def pipeline(group: Group) -> list[torch.Tensor]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(3)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = [nn.Linear(8, 8) for _ in range(ranks)][rank]
    stage = PipelineStage(layer, rank, ranks, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 2 * ranks, loss_fn=lambda out, goal: (out - goal).square().sum())
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(torch.arange(32.0 * ranks).view(-1, 8) / 100)
    elif rank == ranks - 1:
        schedule.step(target=torch.zeros(4 * ranks, 8), losses=losses)
    else:
        schedule.step()
    assert layer.weight.grad is not None
    return [layer.weight.grad, *(loss.detach() for loss in losses)]


LARGER: dict[str, Way] = {
    way.__name__: way
    for way in (
        zero_redundancy_optimizer,
        uneven_inputs_of_a_sharded_optimizer,
        fsdp,
        fully_shard,
        dtensor,
        tensor_parallel,
        pipeline,
        checkpoint,
        sharded_checkpoint,
        checkpoint_in_the_background,
        power_sgd_hook,
        local_sgd,
        functional_collectives,
        functional_collectives_with_a_derivative,
        collectives_with_a_derivative,
    )
}
if torch.__version__ < (2, 9):
    # Gloo's reduce_scatter_tensor gives the sum there instead of the average.
    del LARGER["fully_shard"]
