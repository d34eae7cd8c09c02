"""FSDP2: each rank holds its part of every parameter, and gathers a layer while the layer computes.

torchrun --nproc-per-node 4 docs/examples/frameworks/fully_shard.py --backend unisono
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unisono.interop  # noqa: F401    registers the backend


def main(backend: str) -> None:
    dist.init_process_group(backend)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    # 10 and 3 rows do not divide by 4: the last ranks hold less of them, or nothing.
    model = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {dist.get_backend()}")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(5):
        inputs = torch.randn(16, 8, generator=generator)
        loss = (model(inputs) - inputs[:, :3].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        optimizer.step()
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss / dist.get_world_size()}, norm of the gradient {norm}")
    # Every rank takes part in putting a parameter together.
    total = sum(parameter.full_tensor().sum().item() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"weights sum to {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="unisono")
    main(parser.parse_args().backend)
