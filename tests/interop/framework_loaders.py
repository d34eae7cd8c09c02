"""Program of each rank: a framework prepares a loader over a part of ours, and the rank prints what it gets.

torchrun --nproc-per-node 2 tests/interop/framework_loaders.py --framework fabric --loader PartitionSampler
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import unisono as un

COUNT = 24


def loader(kind: str, workers: int) -> DataLoader[Any]:
    options: dict[str, Any] = {"num_replicas": int(os.environ["WORLD_SIZE"]), "rank": int(os.environ["RANK"])}
    samples: Any = list(range(COUNT))
    if kind == "PartitionSampler":
        sampler = un.data.PartitionSampler(samples, **options)
        return DataLoader(samples, batch_size=2, sampler=sampler, num_workers=workers)
    if kind == "GlobalBatchSampler":
        batches = un.data.GlobalBatchSampler(samples, batch_size=4, **options)
        return DataLoader(samples, batch_sampler=batches, num_workers=workers)
    if kind == "StreamPartition":
        stream: Any = un.data.StreamPartition(samples, batch_size=2, **options)
        return DataLoader(stream, batch_size=2, num_workers=workers)
    shards: Any = un.data.ShardPartition(["0", "6", "12", "18"], six, **options)
    return DataLoader(shards, batch_size=2, num_workers=workers)


def six(first: str) -> range:
    return range(int(first), int(first) + 6)


def with_fabric(given: DataLoader[Any]) -> Iterable[torch.Tensor]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    prepared: Any = fabric.setup_dataloaders(given)
    yield from prepared


def with_lightning(given: DataLoader[Any]) -> Iterable[torch.Tensor]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    taken: list[torch.Tensor] = []

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            taken.append(batch)
            return self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    strategy = DDPStrategy(process_group_backend="gloo")
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=1, logger=False, **quiet
    )
    trainer.fit(Model(), given)
    return taken


def with_accelerate(given: DataLoader[Any], dispatch: bool | None = None) -> Iterable[torch.Tensor]:
    from accelerate import Accelerator, DataLoaderConfiguration

    dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    yield from accelerator.prepare(given)


def with_dispatch(given: DataLoader[Any]) -> Iterable[torch.Tensor]:
    return with_accelerate(given, dispatch=True)


FRAMEWORKS = {
    "Fabric": with_fabric, "Lightning": with_lightning, "Accelerate": with_accelerate, "dispatch": with_dispatch
}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True)
    parser.add_argument("--loader", required=True)
    parser.add_argument("--workers", type=int, default=0)
    given = parser.parse_args()
    found = [
        int(sample) for batch in FRAMEWORKS[given.framework](loader(given.loader, given.workers)) for sample in batch
    ]
    print("TAKEN " + json.dumps(found), flush=True)
