"""Trainings of frameworks on gloo in which only the first rank makes some call. They know nothing of unisono.

torchrun --nproc-per-node 2 tests/interop/watched_frameworks.py accelerate
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

INPUTS = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
SAMPLES = TensorDataset(INPUTS, INPUTS[:, :3].sin())


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def fsdp2() -> None:
    """Collect the weights of a sharded model on one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, goals in DataLoader(SAMPLES, 8):
        nn.functional.mse_loss(model(inputs), goals).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            model[0].weight.full_tensor()


def accelerate() -> None:
    """Gather a loss on one rank."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = layers()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), DataLoader(SAMPLES, batch_size=8)
    )
    for inputs, goals in loader:
        loss = nn.functional.mse_loss(model(inputs), goals)
        accelerator.backward(loss)
        if accelerator.is_main_process:
            accelerator.gather(loss.detach())
        optimizer.step()
        optimizer.zero_grad()


def lightning() -> None:
    """Log a value of all ranks on one rank."""
    import lightning as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
            if self.global_rank == 0:
                self.log("loss", loss, on_step=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy="ddp",
            max_epochs=3,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(), DataLoader(SAMPLES, 8))


if __name__ == "__main__":
    {"fsdp2": fsdp2, "accelerate": accelerate, "lightning": lightning}[sys.argv[1]]()
