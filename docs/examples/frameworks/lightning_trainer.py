"""Lightning's Trainer: a LightningModule, trained and validated.

torchrun --nproc-per-node 4 docs/examples/frameworks/lightning_trainer.py --backend unisono
"""

from __future__ import annotations

import argparse
import os
import tempfile

import lightning as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono.interop  # noqa: F401    registers the backend


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def on_fit_start(self) -> None:
        self.print(f"{self.trainer.world_size} ranks on {dist.get_backend()}")

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("error", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}: error {self.trainer.callback_metrics['error']}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(backend: str) -> None:
    pl.seed_everything(1)
    inputs = torch.randn(250, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    samples = TensorDataset(inputs, inputs[:, :3].sin())
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy=DDPStrategy(process_group_backend=backend),
            precision="64-true",
            max_epochs=3,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(model, DataLoader(samples, 8, shuffle=True), DataLoader(samples, 25))
    model.print(f"weights sum to {sum(parameter.detach().sum() for parameter in model.parameters())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="unisono")
    main(parser.parse_args().backend)
