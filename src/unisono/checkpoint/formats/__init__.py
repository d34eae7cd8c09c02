"""Formats that checkpoints can be converted from and to. Each format is a module in this folder, looked up by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from unisono.core.registry import Registry

__all__ = ["FORMATS", "Format"]


class Format(Protocol):
    """Interface of a file format module.

    Attributes:
        SUFFIXES: Suffixes of output paths that imply this format; other suffixes imply this library's own format.
    """

    SUFFIXES: tuple[str, ...]

    def recognises(self, path: Path) -> bool:
        """Return whether a checkpoint of this format exists at the path."""
        ...

    def read(self, path: Path, trusted: bool) -> Any:
        """Read the state as plain values and CPU tensors. Never runs code in the file unless `trusted` is true."""
        ...

    def write(self, path: Path, state: Any) -> None:
        """Write a state that consists of plain values and tensors."""
        ...


FORMATS: Registry[Format] = Registry("checkpoint format", "unisono.checkpoint.formats")
