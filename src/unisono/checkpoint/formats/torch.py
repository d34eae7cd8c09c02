"""Files written by `torch.save`."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["SUFFIXES", "read", "recognises", "write"]

SUFFIXES = (".pt", ".pth", ".bin")


def recognises(path: Path) -> bool:
    """Return whether the path is a zip archive, or has one of torch's suffixes (older files are plain pickles)."""
    return path.is_file() and (zipfile.is_zipfile(path) or path.suffix in SUFFIXES)


def read(path: Path, trusted: bool) -> Any:
    """Read a saved state. Untrusted files are read in `weights_only=True` mode, which has had vulnerabilities."""
    return torch.load(path, map_location="cpu", weights_only=not trusted)


def write(path: Path, state: Any) -> None:
    """Write as `torch.save` does."""
    torch.save(state, path)
