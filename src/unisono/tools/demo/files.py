"""Pictures from the user: a folder of image files, or arrays in an .npz file."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from unisono.errors import UnavailableError
from unisono.host.distribution import install_command

__all__ = ["read_folder", "read_npz"]

_MAX_SIDE = 32
_NAMES = (("x", "y"), ("images", "labels"))
_GRAY = frozenset({"1", "L", "LA", "I", "I;16", "F"})


def read_folder(folder: Path) -> tuple[torch.Tensor, list[Any]]:
    """Read the images of each sub-folder, labelled with the name of the sub-folder.

    All are scaled to the size of the first image, at most 32 pixels a side.

    Returns:
        Uint8 of shape (n, channels, height, width), with 1 channel if all are gray, else 3; and n names.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UnavailableError(
            "reading an image folder needs Pillow: pip install pillow, or pass an .npz file"
        ) from error
    files = _image_files(folder, frozenset(Image.registered_extensions()))
    size: tuple[int, int] | None = None
    gray, pictures = True, []
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
        Float32 of shape (n, height, width) or (n, channels, height, width), and n labels.
    """
    try:
        import numpy as np
    except ImportError as error:
        raise UnavailableError(f"reading an .npz file needs numpy: {install_command('demo')}") from error
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
