"""Models, and DDP with its best options, for training benchmarks."""

from __future__ import annotations

import inspect
from itertools import pairwise

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ddp", "perceptron", "transformer"]


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def ddp(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Return the model in DDP, with gradients as bucket views and the options of newer torch versions."""
    known = inspect.signature(DistributedDataParallel).parameters
    newer = {"batched_grad_copy": True} if "batched_grad_copy" in known else {}
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, **newer)
