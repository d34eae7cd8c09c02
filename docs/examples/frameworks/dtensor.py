"""DTensor: one large matrix over all ranks, used as if it were whole.

torchrun --nproc-per-node 4 docs/examples/frameworks/dtensor.py --backend unisono
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import unisono.interop  # noqa: F401    registers the backend


def main(backend: str) -> None:
    dist.init_process_group(backend)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {dist.get_backend()}")
    # The rows of one matrix and the columns of another one are spread over the ranks; 6 rows are uneven on 4 ranks.
    rows = distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)]).requires_grad_()
    columns = distribute_tensor(torch.randn(8, 6), mesh, [Shard(1)])
    product = rows @ columns
    loss = product.tanh().sum()
    loss.backward()
    # Each rank holds a part of every sum, until all of them are added.
    partial = rows.redistribute(mesh, [Shard(1)]) @ columns.redistribute(mesh, [Shard(0)])
    results = {
        "product": product,
        "the same, by partial sums": partial,
        "loss": loss,
        "gradient": rows.grad,
        "rows turned into columns": rows.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).cos(),
        "sums of columns": rows.sum(0),
    }
    for name, result in results.items():
        whole = result.full_tensor().detach()
        if dist.get_rank() == 0:
            print(f"{name}: {result.placements}, sum {whole.sum().item()}, squares {whole.square().sum().item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="unisono")
    main(parser.parse_args().backend)
