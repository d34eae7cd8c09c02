"""Images and their classes: scikit-learn's digits, or the user's own images."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unisono.errors import UnavailableError
from unisono.host.distribution import required

__all__ = ["Pictures", "load", "read_folder", "read_npz", "split"]

_HELD_OUT = 0.2
_FEWEST = 10


@dataclass(frozen=True, slots=True)
class Pictures:
    """Dataset of images, with `len()` and indexing.

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
        ValueError: `path` contains nothing to train on; the message states the expected input.
        UnavailableError: A package needed to read the images is missing; the message says how to install it.
    """
    if path is None:
        return _digits()
    if not path.exists():
        raise ValueError(f"{path} does not exist: pass a folder with one sub-folder per class, or an .npz file")
    pixels, labels = read_folder(path) if path.is_dir() else read_npz(path)
    return _pictures(pixels, labels, f"pictures of {path}")


def split(pictures: Pictures, seed: int) -> tuple[Pictures, Pictures]:
    """Split the images into a training set and a held-out test set, which is a random fifth of all images."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed))
    held_out = round(len(pictures) * _HELD_OUT)
    return _some(pictures, order[held_out:]), _some(pictures, order[:held_out])


def _some(pictures: Pictures, indices: torch.Tensor) -> Pictures:
    return replace(pictures, x=pictures.x[indices], y=pictures.y[indices])


def _digits() -> Pictures:
    why = "the handwritten digits come with scikit-learn; pass your own pictures with --data, or install it"
    found = required("sklearn.datasets", why, "demo").load_digits()
    return _pictures(torch.from_numpy(found.images), found.target.tolist(), "handwritten digits")


def _pictures(pixels: torch.Tensor, labels: Sequence[Any], name: str) -> Pictures:
    """Normalize pixels of shape (n, height, width) or (n, channels, height, width), and convert labels to indices."""
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


_MAX_SIDE = 32
_NAMES = (("x", "y"), ("images", "labels"))
_GRAY = frozenset({"1", "L", "LA", "I", "I;16", "F"})


def read_folder(folder: Path) -> tuple[torch.Tensor, list[Any]]:
    """Read the images of each sub-folder, labelled with the sub-folder's name.

    All images are scaled to the size of the first image, but to at most 32 by 32 pixels.

    Returns:
        A uint8 tensor of shape (n, channels, height, width), with 1 channel if all images are gray, else 3; and n class
        names.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UnavailableError(
            "reading an image folder needs Pillow: pip install pillow, or pass an .npz file"
        ) from error
    files = _image_files(folder, frozenset(Image.registered_extensions()))
    size: tuple[int, int] | None = None
    gray = True
    pictures = []
    for file, _ in files:
        try:
            with Image.open(file) as image:
                size = size or (min(_MAX_SIDE, image.width), min(_MAX_SIDE, image.height))
                gray = gray and image.mode in _GRAY
                pictures.append(_pixels(image.convert("RGB").resize(size).tobytes(), size))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"{file} cannot be read as an image ({error}): remove it, or save it again") from error
    pixels = torch.stack(pictures)
    return (pixels[:, :1] if gray else pixels), [name for _, name in files]


def _image_files(folder: Path, suffixes: frozenset[str]) -> list[tuple[Path, str]]:
    """Return every image file with its class, in a deterministic order."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ValueError(f"{folder} has no sub-folders: put the images of each class into a sub-folder")
    files = []
    for entry in classes:
        found = sorted(file for file in entry.iterdir() if file.suffix.lower() in suffixes and file.name[0] != ".")
        if not found:
            raise ValueError(f"{entry} holds no image files such as .png or .jpg: fill it, or remove it")
        files += [(file, entry.name) for file in found]
    return files


def _pixels(data: bytes, size: tuple[int, int]) -> torch.Tensor:
    width, height = size
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1)


def read_npz(path: Path) -> tuple[torch.Tensor, list[Any]]:
    """Read the arrays `x` and `y`, or `images` and `labels`, of an .npz file. Pickled objects are refused.

    Returns:
        A float32 tensor of shape (n, height, width) or (n, channels, height, width), and n labels.
    """
    np = required("numpy", "reading an .npz file needs numpy", "demo")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is neither a folder nor an .npz file")
    try:
        with np.load(path, allow_pickle=False) as found:
            for pixels, labels in _NAMES:
                if pixels in found and labels in found:
                    return _checked(found[pixels], found[labels])
            raise ValueError(
                f"it needs arrays named x and y, or images and labels, and has {', '.join(found) or 'none'}"
            )
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be trained on: {error}") from error


def _checked(x: Any, y: Any) -> tuple[torch.Tensor, list[Any]]:
    if x.ndim not in (3, 4) or x.dtype.kind not in "buif" or 0 in x.shape:
        raise ValueError(
            "the pictures must be numbers of shape (n, height, width), with an optional axis of colours, but are "
            f"{x.dtype} of shape {x.shape}"
        )
    if y.shape != x.shape[:1] or y.dtype.kind not in "buiUS":
        raise ValueError(
            f"the {len(x)} pictures need as many labels, whole numbers or names, but have {y.dtype} of shape {y.shape}"
        )
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    return torch.from_numpy(x.astype("float32")), y.tolist()
