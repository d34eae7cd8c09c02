"""Pipelining: each rank holds some layers, and small batches travel through all of them.

torchrun --nproc-per-node 4 docs/examples/frameworks/pipelining.py --backend unisono
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import unisono.interop  # noqa: F401    registers the backend

LAYERS_A_RANK = 2


def main(backend: str) -> None:
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS_A_RANK * ranks)]
    # Rank r holds the layers r, r + ranks, r + 2 * ranks and so on: every batch comes by several times.
    places = range(rank, len(layers), ranks)
    stages = [PipelineStage(layers[place], place, len(layers), torch.device("cpu")) for place in places]
    schedule = ScheduleInterleaved1F1B(stages, 2 * ranks, loss_fn=nn.functional.mse_loss)
    mine = nn.ModuleList(layers[place] for place in places)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
    if rank == 0:
        print(f"{ranks} ranks on {dist.get_backend()}")
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        inputs = torch.randn(8 * ranks, 8, generator=generator)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        # The first rank has the inputs; the last rank has the targets, and so the loss.
        given = (inputs,) if rank == 0 else ()
        known = {"target": inputs.sin(), "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*given, **known)
        optimizer.step()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(loss, ranks - 1)
        if rank == 0:
            print(f"step {step}: loss {loss}")
    total = torch.stack([parameter.detach().sum() for parameter in mine.parameters()]).sum()
    dist.reduce(total, 0)
    if rank == 0:
        print(f"weights sum to {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="unisono")
    main(parser.parse_args().backend)
