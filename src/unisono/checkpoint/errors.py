"""Errors of checkpoints: the fault, its place, and the last good checkpoint to load instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.errors import CommError

__all__ = [
    "CheckpointError",
    "CorruptError",
    "FormatError",
    "NoCheckpointError",
    "StateError",
    "StorageError",
    "listed",
]

_NAMED = 6


class CheckpointError(CommError):
    """Anything that went wrong with a checkpoint. It is raised on every rank, and leaves the communicator usable.

    Attributes:
        path: The checkpoint that it is about.
        tensors: Names of the tensors that it is about, as many as are known.

    Example:
        >>> print(CheckpointError("it is damaged", path="runs/7", rank=1, size=4))
        rank 1 of 4: checkpoint runs/7: it is damaged
    """

    def __init__(
        self, message: str = "", *, path: str | None = None, tensors: Sequence[str] = (), **known: Any
    ) -> None:
        super().__init__(message, **known)
        self.path, self.tensors = path, tuple(tensors)

    def __str__(self) -> str:
        said = super().__str__()
        return said if self.path is None else f"{said.removesuffix(self.message)}checkpoint {self.path}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (kind, message, fields) = super().__reduce__()
        return _rebuild, (rebuild, kind, message, fields, self.path, self.tensors)


def _rebuild(rebuild: Any, kind: Any, message: str, fields: Any, path: str | None, tensors: tuple[str, ...]) -> Any:
    error = rebuild(kind, message, fields)
    error.path, error.tensors = path, tensors
    return error


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is nothing at that path, or a save that was never finished."""


class CorruptError(CheckpointError):
    """Some bytes are not those that were saved: a flipped bit, half a file, files of two saves."""


class FormatError(CheckpointError, ValueError):
    """The checkpoint was written by a newer version, or the path holds no checkpoint."""


class StateError(CheckpointError, ValueError):
    """The checkpoint is intact, but of another model: names are missing or unexpected, or shapes differ."""


class StorageError(CheckpointError, OSError):
    """The storage refused: it is full, read-only, gone, or broken."""


def listed(names: Sequence[str]) -> str:
    """Names for a message: all of a few, the first of many.

    Example:
        >>> listed(["a", "b"])
        "'a', 'b'"
    """
    shown = ", ".join(map(repr, names[:_NAMED]))
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
