"""Two dimensions: pairs of ranks share each layer (tensor parallel), and the pairs share the parameters (FSDP2).

torchrun --nproc-per-node 4 docs/examples/frameworks/tensor_parallel_fsdp.py --backend unisono
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unisono.interop  # noqa: F401    registers the backend


def main(backend: str) -> None:
    dist.init_process_group(backend)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)]
    for block in blocks:
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    model = fully_shard(nn.Sequential(*blocks), mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if dist.get_rank() == 0:
        kinds = {dist.get_backend(group) for group in (None, *mesh.get_all_groups())}
        print(f"{dist.get_world_size()} ranks on {', '.join(kinds)}")
    # Ranks of a pair compute one batch together, so they need the same one.
    generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    for step in range(5):
        inputs = torch.randn(16, 8, generator=generator)
        loss = (model(inputs) - inputs.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss, group=mesh["data"].get_group())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss / mesh['data'].size()}")
    # Every rank takes part in putting a parameter together.
    total = sum(parameter.full_tensor().sum().item() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"weights sum to {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="unisono")
    main(parser.parse_args().backend)
