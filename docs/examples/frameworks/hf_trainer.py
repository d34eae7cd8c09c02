"""Hugging Face's Trainer: a small model of its own form, trained, evaluated and saved.

torchrun --nproc-per-node 4 docs/examples/frameworks/hf_trainer.py --backend unisono
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, set_seed

import unisono.interop  # noqa: F401    registers the backend


class Config(PretrainedConfig):
    model_type = "small"


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
        self.post_init()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(inputs)
        return {"loss": nn.functional.mse_loss(outputs, labels), "outputs": outputs}


def main(backend: str) -> None:
    dist.init_process_group(backend)  # before TrainingArguments, which take a group that is there
    torch.set_default_dtype(torch.float64)
    set_seed(1)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # rank 0's
        train(folder[0])
        dist.barrier()
    dist.destroy_process_group()


def train(folder: str) -> None:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        disable_tqdm=True,
        report_to="none",
    )
    inputs = torch.randn(250, 8, generator=torch.Generator().manual_seed(1))
    samples = [{"inputs": given, "labels": given[:3].sin()} for given in inputs]
    trainer = Trainer(Model(Config()), arguments, train_dataset=samples[:200], eval_dataset=samples[200:])
    trainer.remove_callback(PrinterCallback)  # it prints times, too
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"{arguments.world_size} ranks on {dist.get_backend()}")
        for log in trainer.state.log_history:
            print({name: value for name, value in log.items() if name in ("step", "loss", "eval_loss", "grad_norm")})
        saved = Model.from_pretrained(f"{folder}/checkpoint-{trainer.state.global_step}")
        print(f"saved weights sum to {sum(p.detach().double().sum() for p in saved.parameters())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="unisono")
    main(parser.parse_args().backend)
