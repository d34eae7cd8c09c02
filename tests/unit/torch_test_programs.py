"""Programs for torch.distributed on three ranks, as under torchrun: each raises where something is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

SIZE = 3
PROGRAMS: list[Callable[[], None]] = []


def program(function: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS.append(function)
    return function


def shared_folder() -> str:
    """Return a folder that the first rank's test was given: the same on all ranks."""
    return os.environ["UNISONO_TEST_FOLDER"]


@program
def collectives() -> None:
    rank = dist.get_rank()
    tensor = torch.tensor([float(rank)])
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert tensor.item() == 3
    gathered: list[int] = [0] * SIZE
    dist.all_gather_object(gathered, rank)
    assert gathered == [0, 1, 2]
    received = torch.empty(1)
    following = dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % SIZE)
    for message in dist.batch_isend_irecv([following, dist.P2POp(dist.irecv, received, (rank - 1) % SIZE)]):
        message.wait()
    assert received.item() == (rank - 1) % SIZE
    dist.monitored_barrier()


@program
def the_place_is_that_of_torchrun() -> None:
    assert int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"]) == dist.get_rank()
    assert int(os.environ["WORLD_SIZE"]) == int(os.environ["LOCAL_WORLD_SIZE"]) == dist.get_world_size() == SIZE
    assert os.environ["MASTER_ADDR"]
    assert int(os.environ["MASTER_PORT"])
    assert (dist.get_backend(), dist.is_torchelastic_launched()) == ("gloo", False)


@program
def parts_of_the_ranks() -> None:
    ends = dist.new_group([0, 2])
    tensor = torch.ones(1)
    if dist.get_rank() != 1:
        dist.all_reduce(tensor, group=ends)
        assert tensor.item() == 2
        dist.destroy_process_group(ends)
    mesh = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("replicate", "shard"))
    assert mesh["replicate"].get_local_rank() == dist.get_rank()
    dist.barrier(group=mesh.get_group("replicate"))


@program
def functional_collectives() -> None:
    summed = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert (summed + 0).tolist() == [SIZE, SIZE]
    weights = torch.ones(2, requires_grad=True)
    with_gradients.all_reduce(weights * dist.get_rank()).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [SIZE * dist.get_rank()] * 2


def layer() -> nn.Module:
    """Return a layer whose weights are the same on all ranks, without a draw from a generator that they share."""
    made = nn.Linear(6, 6)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return made


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.full((2, 6), float(dist.get_rank()))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_alike(tensor: torch.Tensor) -> None:
    copies = [torch.empty_like(tensor) for _ in range(SIZE)]
    dist.all_gather(copies, tensor)
    assert all(torch.equal(copy, tensor) for copy in copies)


@program
def data_parallel() -> None:
    model = DistributedDataParallel(nn.Sequential(layer(), nn.ReLU(), layer()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        step(model, optimizer)
    with model.join():
        for _ in range(dist.get_rank()):
            model(torch.ones(1, 6)).sum().backward()
    assert_alike(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


@program
def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    whole = nn.Sequential(layer(), layer())
    sharded = nn.Sequential(layer(), layer())
    mesh = init_device_mesh("cpu", (SIZE,))
    for part in sharded:
        fully_shard(part, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    data = DistributedDataParallel(whole)
    for model in (data, sharded):
        step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for expected, parameter in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected)  # type: ignore[attr-defined]


@program
def sharded_tensors_and_their_checkpoint() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    values = torch.arange(12.0).view(6, 2)
    tensor = distribute_tensor(values, mesh, [Shard(0)])
    assert torch.equal(tensor.redistribute(mesh, [Replicate()]).to_local(), values)
    dcp.save({"values": tensor}, checkpoint_id=shared_folder())
    loaded = {"values": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])}
    dcp.load(loaded, checkpoint_id=shared_folder())
    assert torch.equal(loaded["values"].full_tensor(), values)


@program
def groups_of_the_tested_code() -> None:
    """The first call replaces the group that the test was given; a second one is an error, as under torchrun."""
    init_process_group("gloo")
    with pytest.raises(ValueError, match="twice"):
        init_process_group("gloo")
    dist.barrier()
    destroy_process_group()
    assert not dist.is_initialized()
    init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=int(os.environ["RANK"]), world_size=SIZE)
    collectives()
    destroy_process_group()
