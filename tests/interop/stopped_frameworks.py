"""Program of each rank: a framework's training, stopped by the recipe of docs/how-to/stop-together.md, or resumed.

unisono run -n 2 tests/interop/stopped_frameworks.py Lightning folder stop
"""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as un

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "stop-together.md"
SAMPLES, ACCUMULATE, STOP_AT = 384, 2, 3
"""One epoch: on each of two ranks 48 batches of 4 samples, of which two make a step."""


def recipe(framework: str, folder: str) -> str:
    """Return the code of the page."""
    block = PAGE.read_text().split(f'=== "{framework}"', 1)[1].split("```", 2)[1]
    return textwrap.dedent(block.removeprefix("py")).replace('"runs/7/', f'"{folder}/')


def data() -> DataLoader[Any]:
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs[:, :3].sin()), batch_size=4)


def kill(step: int) -> None:
    """Send the signal to rank 1 alone, in the middle of an accumulation."""
    if sys.argv[3] == "stop" and step == STOP_AT and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)


def with_lightning(model: nn.Module, folder: str) -> tuple[un.Communicator, int]:
    import lightning
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx % ACCUMULATE == 0:
                kill(self.trainer.global_step)
            return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    names: dict[str, Any] = {"Callback": Callback, "signal": signal, "un": un}
    exec(recipe("Lightning", folder), names)
    stop = names["StopTogether"]()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="unisono"),
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[stop],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = Path(folder) / "stopped.ckpt"
    trainer.fit(Module(), data(), ckpt_path=saved if saved.exists() else None, weights_only=False)
    return stop.comm, trainer.global_step


def with_accelerate(model: nn.Module, folder: str) -> tuple[un.Communicator, int]:
    from accelerate import Accelerator

    dist.init_process_group("unisono")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1.0)
    accelerator.register_for_checkpointing(scheduler)
    if (Path(folder) / "stopped").exists():
        accelerator.load_state(f"{folder}/stopped")
        loader = accelerator.skip_first_batches(loader, scheduler.last_epoch * ACCUMULATE)

    def train(batch: Any) -> None:
        kill(scheduler.last_epoch)
        accelerator.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        if accelerator.sync_gradients:
            scheduler.step()
        optimizer.zero_grad()

    names = {"accelerator": accelerator, "loader": loader, "model": model, "train": train, "un": un}
    exec(recipe("Accelerate", folder).replace("...", "train(batch)"), names)
    return names["comm"], scheduler.last_epoch


def main(framework: str, folder: str) -> int:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    comm, steps = {"Lightning": with_lightning, "Accelerate": with_accelerate}[framework](model, folder)
    weights = float(sum(parameter.detach().sum() for parameter in model.parameters()))
    print("ENDED", json.dumps([steps, comm.stop_reason, weights]), flush=True)
    comm.close()
    dist.destroy_process_group()
    return un.stop.exit_status(comm, saved=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
