"""Meshes of two dimensions over four ranks: torch makes their groups itself, and they give what gloo's give."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import unisono as un
import unisono.interop

Way = Callable[[DeviceMesh], list[torch.Tensor]]


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().sum().backward()
        optimizer.step()


def full(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach() for p in model.parameters()]


def tensors_of_two_dimensions(mesh: DeviceMesh) -> list[torch.Tensor]:
    from torch.distributed.tensor import Shard, distribute_tensor

    given = distribute_tensor(torch.arange(48.0).view(8, 6), mesh, [Shard(0), Shard(1)])
    turned = given.redistribute(mesh, [Shard(1), Shard(0)])
    return [given.full_tensor(), given.sum(0).full_tensor(), turned.to_local(), turned.full_tensor()]


def shards_of_replicas(mesh: DeviceMesh) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=mesh)
    train(model, seed=dist.get_rank())
    return full(model)


def shards_of_shards(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Tensor parallel in one dimension, fully sharded in the other."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = mlp()
    parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["outer"])
    train(model, seed=mesh["outer"].get_local_rank())
    return full(model)


def hybrid_shards(mesh: DeviceMesh) -> list[torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    hybrid = ShardingStrategy.HYBRID_SHARD
    model = FullyShardedDataParallel(mlp(), device_mesh=mesh, sharding_strategy=hybrid, device_id=torch.device("cpu"))
    train(model, seed=dist.get_rank())
    with FullyShardedDataParallel.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def functions_along_a_dimension(mesh: DeviceMesh) -> list[torch.Tensor]:
    import torch.distributed._functional_collectives as functional

    mine = torch.full((2,), float(dist.get_rank()))
    results = [functional.all_reduce(mine, "sum", (mesh, 0)), functional.all_gather_tensor(mine, 0, mesh["inner"])]
    return [*map(functional.wait_tensor, results), torch.tensor(mesh._flatten("flat").size())]


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        tensors_of_two_dimensions,
        shards_of_replicas,
        shards_of_shards,
        hybrid_shards,
        functions_along_a_dimension,
    )
}


def on_both(comm: un.Communicator, folder: Path) -> dict[str, str]:
    """For each way, what is wrong with it, or nothing."""
    warnings.simplefilter("ignore")
    assert unisono.interop.register is not None
    found: dict[str, list[list[torch.Tensor]]] = {name: [] for name in WAYS}
    for backend in ("gloo", "unisono"):
        method = f"file://{folder}/{backend}"
        dist.init_process_group(backend, init_method=method, rank=comm.rank, world_size=comm.size)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        for name, way in WAYS.items():
            found[name].append(way(mesh))
        dist.destroy_process_group()
    return {name: differences(*results) for name, results in found.items()}


def differences(expected: list[torch.Tensor], got: list[torch.Tensor]) -> str:
    # Two at a time add up in one order only; it is the halves that may come in another one.
    same = len(expected) == len(got) > 0 and all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(expected, got, strict=True)
    )
    return "" if same else f"gloo gives {expected}, unisono {got}"


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return un.launch(on_both, 4, "shm", (Path(folder),), timeout=30)


@pytest.mark.soak
@pytest.mark.parametrize("name", WAYS)
def test_equals_gloo(found: list[dict[str, Any]], name: str) -> None:
    assert [of_rank[name] for of_rank in found] == [""] * 4
