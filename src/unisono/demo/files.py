"""Pictures of the user: a folder of image files, or arrays in an .npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import UnavailableError

if TYPE_CHECKING:
    import numpy

__all__ = ["read_folder", "read_npz"]

_MAX_SIDE = 32
_NAMES = (("x", "y"), ("images", "labels"))
_GRAY = frozenset({"1", "L", "LA", "I", "I;16", "F"})


def read_folder(folder: Path) -> tuple[torch.Tensor, list[str]]:
    """The images of each sub-folder, and that sub-folder's name for each.

    All are scaled to the size of the first one, at most 32 pixels a side. They stay gray if all are.

    Returns:
        Uint8 of shape (n, channels, height, width), and n names.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UnavailableError(
            "reading an image folder needs Pillow: pip install pillow, or give an .npz file"
        ) from error
    files = _image_files(folder, frozenset(Image.registered_extensions()))
    images = []
    for file, _ in files:
        try:
            with Image.open(file) as image:
                image.load()
                images.append(image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"{file} cannot be read as an image: remove it, or save it anew ({error})") from error
    mode = "L" if all(image.mode in _GRAY for image in images) else "RGB"
    side = tuple(min(_MAX_SIDE, length) for length in images[0].size)
    pixels = torch.stack([_pixels(image.convert(mode).resize(side)) for image in images])
    return pixels, [name for _, name in files]


def _image_files(folder: Path, suffixes: frozenset[str]) -> list[tuple[Path, str]]:
    """Every image file with its class, in an order that is the same everywhere."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ValueError(f"{folder} has no sub-folders: put the images of each class into one of its own")
    files = [
        (file, entry.name)
        for entry in classes
        for file in sorted(entry.iterdir())
        if file.suffix.lower() in suffixes and not file.name.startswith(".")
    ]
    for entry in classes:
        if entry.name not in {name for _, name in files}:
            raise ValueError(f"{entry} holds no image files such as .png or .jpg; remove it, or fill it")
    return files


def _pixels(image: Any) -> torch.Tensor:
    width, height = image.size
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(height, width, -1).permute(2, 0, 1)


def read_npz(path: Path) -> tuple[torch.Tensor, list[object]]:
    """The arrays `x` and `y`, or `images` and `labels`, of an .npz file. Pickled objects are refused.

    Returns:
        Pixels of shape (n, height, width) or (n, channels, height, width), and n labels.
    """
    try:
        import numpy as np
    except ImportError as error:
        raise UnavailableError("reading an .npz file needs numpy: pip install 'unisono[demo]'") from error
    if path.suffix != ".npz":
        raise ValueError(f"{path} is neither a folder nor an .npz file")
    try:
        with np.load(path, allow_pickle=False) as found:
            for pair in _NAMES:
                if set(pair) <= set(found.files):
                    return _checked(path, found[pair[0]], found[pair[1]])
            raise ValueError(f"needs the arrays x and y, or images and labels, but has {', '.join(found.files)}")
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be trained on: {error}") from error


def _checked(path: Path, x: numpy.ndarray[Any, Any], y: numpy.ndarray[Any, Any]) -> tuple[torch.Tensor, list[object]]:
    if x.ndim not in (3, 4) or x.dtype.kind not in "buif" or 0 in x.shape:
        raise ValueError(
            f"the pictures must be numbers of shape (n, height, width), with a last axis for colours if any, "
            f"but are {x.dtype} of shape {x.shape}"
        )
    if y.shape != x.shape[:1] or y.dtype.kind not in "buiUS":
        raise ValueError(f"the {len(x)} pictures need as many whole numbers or names, not {y.dtype} of shape {y.shape}")
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    # A copy in this machine's byte order, which torch can take; half and long double among them.
    return torch.from_numpy(x.astype("float32")), y.tolist()
