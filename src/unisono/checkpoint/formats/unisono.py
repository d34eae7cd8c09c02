"""This library's own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.checkpoint.archive import open_archive
from unisono.checkpoint.manifest import MANIFEST
from unisono.checkpoint.saver import save

__all__ = ["read", "recognises", "suits", "write"]


def recognises(path: Path) -> bool:
    """A directory with a manifest."""
    return (path / MANIFEST).exists()


def suits(path: Path) -> bool:
    """A name without another format's suffix."""
    return path.suffix not in (".pt", ".pth", ".bin", ".safetensors", ".dcp")


def read(path: Path, trusted: bool) -> Any:
    """The state as rank 0 saved it; nothing here needs trust."""
    with open_archive(path) as archive:
        return archive.state()


def write(path: Path, state: Any) -> None:
    """Write as `save` does on one rank."""
    save(path, state)
