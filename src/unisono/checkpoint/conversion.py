"""Conversion from and to other formats, and comparison of two checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.archive import Archive
from unisono.checkpoint.errors import FormatError, NoCheckpointError
from unisono.checkpoint.formats import FORMATS
from unisono.checkpoint.tree import as_bytes, leaves

__all__ = ["convert", "differences", "read_any"]


def read_any(path: str | Path, *, trusted: bool = False) -> Any:
    """Return the state stored at a path in any known format, as plain values and CPU tensors.

    Args:
        path: A checkpoint of this library, a file written by `torch.save` or safetensors, or a DCP directory.
        trusted: Whether pickles in the file may run code. Set `trusted` only for files that you would run as a program.

    Raises:
        NoCheckpointError: Nothing exists at `path`.
        FormatError: The format is unknown.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/old.pt"
        >>> torch.save({"w": torch.ones(2)}, path)
        >>> read_any(path)
        {'w': tensor([1., 1.])}
    """
    file = Path(path)
    for name in FORMATS.names():
        if FORMATS[name].recognises(file):
            return FORMATS[name].read(file, trusted)
    if not file.exists():
        raise NoCheckpointError("there is no such file or directory", path=str(file))
    raise FormatError(f"{file} holds no checkpoint in a known format ({', '.join(FORMATS.names())})")


def convert(source: str | Path, target: str | Path, *, to: str | None = None, trusted: bool = False) -> None:
    """Read a checkpoint in any known format, and write it in another format.

    Args:
        source: As for `read_any`.
        target: Path to write. The path's suffix selects the format: `.pt`, `.pth` or `.bin` for the format of
            `torch.save`; `.safetensors` for the tensors only; `.dcp` for a DCP directory; anything else for this
            library's own format.
        to: Format to write, if the target's suffix does not select it: "unisono", "torch", "safetensors", "dcp".
        trusted: As for `read_any`.

    Raises:
        NoCheckpointError: `source` does not exist.
        FormatError: `source` has an unknown format, or the target's format cannot hold the source's tensors.
        CorruptError, OSError: `source` is damaged, or cannot be read.
        ValueError: `to` is not a known format.
        UnavailableError: `source` or `target` is a safetensors file, and the safetensors package is not installed.
        pickle.UnpicklingError: `source` contains objects of classes other than torch's, and `trusted` is false.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"w": torch.ones(2)}, folder + "/old.pt")
        >>> un.checkpoint.convert(folder + "/old.pt", folder + "/new")
        >>> un.checkpoint.load(folder + "/new")
        {'w': tensor([1., 1.])}
    """
    file = Path(target)
    if to is None:
        suited = [name for name in FORMATS.names() if file.suffix in FORMATS[name].SUFFIXES]
        to = suited[0] if suited else "unisono"
    form = FORMATS[to]
    form.write(file, read_any(source, trusted=trusted))


def differences(first: Archive, second: Archive) -> list[str]:
    """Differences between two checkpoints, one per line; empty if they are equal."""
    found = []
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second:
            found.append(f"{name}: only in the {'second' if name not in first else 'first'}")
            continue
        one = first.manifest.tensors[name]
        other = second.manifest.tensors[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found.append(f"{name}: {one.dtype} {list(one.shape)}, {other.dtype} {list(other.shape)}")
        elif not torch.equal(as_bytes(first[name]), as_bytes(second[name])):
            found.append(f"{name}: {_distance(first[name], second[name])}")
    mine = leaves(first.manifest.state)
    theirs = leaves(second.manifest.state)
    pairs = {name: (mine.get(name, "(absent)"), theirs.get(name, "(absent)")) for name in (*mine, *theirs)}
    return found + [f"{name}: {one}, {other}" for name, (one, other) in pairs.items() if one != other]


def _distance(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.is_complex():
        one = torch.view_as_real(one)
        other = torch.view_as_real(other)
    apart = (one.double() - other.double()).abs()
    return f"{int((apart != 0).sum())} of {apart.numel()} elements differ, by up to {apart.max().item():.3g}"
