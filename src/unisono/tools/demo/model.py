"""A small convolutional network, its initial weights, and its accuracy."""

from __future__ import annotations

import torch
from torch import nn

from unisono.tools.demo.data import Pictures

__all__ = ["accuracy", "build"]


def build(pictures: Pictures, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a network for pictures of this size, colours and classes, on the CPU; its weights depend only on the seed.

    The global random generator is neither read nor changed: ranks that are threads share it.
    """
    channels = pictures.x.shape[1]
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, pictures.classes),
        )
    model = model.to_empty(device="cpu").to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_uniform_(parameter, nonlinearity="relu", generator=generator)
        else:
            nn.init.zeros_(parameter)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, pictures: Pictures) -> float:
    """Return the fraction of these pictures that the network classifies correctly."""
    return float((model(pictures.x).argmax(dim=1) == pictures.y).double().mean())
