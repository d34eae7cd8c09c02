"""Pictures and their classes: scikit-learn's digits, or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unisono.errors import UnavailableError
from unisono.host.distribution import install_command
from unisono.tools.demo.files import read_folder, read_npz

__all__ = ["Pictures", "load", "split"]

_HELD_OUT = 0.2
_FEWEST = 10


@dataclass(frozen=True, slots=True)
class Pictures:
    """A dataset of pictures: it has a length, and can be indexed.

    Attributes:
        x: Float32 of shape (n, channels, height, width), with mean 0 and standard deviation 1 over all elements.
        y: Int64 of shape (n,), from 0 to `classes` - 1.
        classes: Number of classes.
        name: Description of the dataset.
    """

    x: torch.Tensor
    y: torch.Tensor
    classes: int
    name: str

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], int(self.y[index])


def load(path: Path | None = None) -> Pictures:
    """Load the handwritten digits, or `path`: an image folder, or an .npz file.

    Raises:
        ValueError: There is nothing to train on at `path`; the message states the expected input.
        UnavailableError: A package that reads it is missing; the message says how to install it.
    """
    if path is None:
        return _digits()
    if not path.exists():
        raise ValueError(f"{path} does not exist: pass a folder with one sub-folder per class, or an .npz file")
    pixels, labels = read_folder(path) if path.is_dir() else read_npz(path)
    return _pictures(pixels, labels, f"pictures of {path}")


def split(pictures: Pictures, seed: int) -> tuple[Pictures, Pictures]:
    """Split the pictures into a training set and a held-out test set, a random fifth of all."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed))
    held_out = round(len(pictures) * _HELD_OUT)
    return _some(pictures, order[held_out:]), _some(pictures, order[:held_out])


def _some(pictures: Pictures, indices: torch.Tensor) -> Pictures:
    return replace(pictures, x=pictures.x[indices], y=pictures.y[indices])


def _digits() -> Pictures:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UnavailableError(
            f"the handwritten digits come with scikit-learn: {install_command('demo')}, "
            "or pass your own pictures with --data"
        ) from error
    found: Any = load_digits()
    return _pictures(torch.from_numpy(found.images), found.target.tolist(), "handwritten digits")


def _pictures(pixels: torch.Tensor, labels: Sequence[Any], name: str) -> Pictures:
    """Normalize pixels of (n, height, width) or (n, channels, height, width), and number the classes."""
    numbers = {label: number for number, label in enumerate(sorted(set(labels)))}
    if len(numbers) < 2:
        raise ValueError(f"the {name} are all of one class; training needs at least two")
    if len(labels) < _FEWEST:
        raise ValueError(f"the {name} are {len(labels)}; training needs at least {_FEWEST}")
    x = pixels.to(torch.float32)
    x = x if x.dim() == 4 else x.unsqueeze(1)
    if not bool(x.isfinite().all()):
        raise ValueError(f"the {name} have pixels that are not finite numbers; replace them")
    x = (x - x.mean()) / x.std().clamp_min(1e-6)
    return Pictures(x.contiguous(), torch.tensor([numbers[label] for label in labels]), len(numbers), name)
