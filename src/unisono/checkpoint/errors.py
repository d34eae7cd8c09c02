"""Checkpoint errors. Messages name the fault, its location, and the last good checkpoint to load instead."""

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
    """Base class of checkpoint errors, which are raised on every rank and leave the communicator usable.

    Attributes:
        path: Path of the checkpoint.
        tensors: Names of the tensors that are known to be affected.

    Args:
        message: Description of the fault, as a clause.
        path, tensors: The attributes.
        known: Fields of `CommError`, such as `rank`, `size` and `operation`.

    Example:
        >>> print(CheckpointError("it is damaged", path="runs/7", rank=1, size=4))
        rank 1 of 4: checkpoint runs/7: it is damaged
    """

    def __init__(
        self, message: str = "", *, path: str | None = None, tensors: Sequence[str] = (), **known: Any
    ) -> None:
        super().__init__(message, **known)
        self.path = path
        self.tensors: tuple[str, ...] = tuple(tensors)

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.path is None else f"{text.removesuffix(self.message)}checkpoint {self.path}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, given, notes = super().__reduce__()
        return rebuild, given, {**(notes or {}), "path": self.path, "tensors": self.tensors}


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path, or only an unfinished save.

    Example:
        >>> try:
        ...     un.checkpoint.load("no/such/place")
        ... except un.checkpoint.NoCheckpointError as error:
        ...     print(error, error.__notes__)
        load: checkpoint no/such/place: there is none ['there is no other good checkpoint beside it']
    """


class CorruptError(CheckpointError):
    """The checkpoint is damaged, for example by a flipped bit, truncation, or mixing the files of two saves.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp())
        >>> un.checkpoint.save(path, {"w": torch.zeros(3)})
        >>> file = next(path.glob("*.safetensors"))
        >>> _ = file.write_bytes(file.read_bytes()[:-1] + b"x")
        >>> try:
        ...     un.checkpoint.verify(path)
        ... except un.checkpoint.CorruptError as error:
        ...     error.tensors
        ('w',)
    """


class FormatError(CheckpointError, ValueError):
    """The checkpoint has a newer or unknown format, or its plain values would take too much memory.

    Example:
        >>> import tempfile
        >>> un.checkpoint.convert(tempfile.mkdtemp(), "new")
        Traceback (most recent call last):
        ...
        unisono.checkpoint.errors.FormatError: ... holds no checkpoint in a known format ...
    """


class StateError(CheckpointError, ValueError):
    """The checkpoint is intact, but belongs to a different model: names are missing or unexpected, or shapes differ.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> un.checkpoint.save(path, {"w": torch.zeros(3)})
        >>> un.checkpoint.load(path, {"w": torch.zeros(2)})
        Traceback (most recent call last):
        ...
        unisono.checkpoint.errors.StateError: ...: it is of another model: 'w' has shape (3,) in it, (2,) here
    """


class StorageError(CheckpointError, OSError):
    """The storage is full, read-only, gone, or broken.

    Example:
        >>> un.checkpoint.save("/dev/null/first", {"step": 7})
        Traceback (most recent call last):
        ...
        unisono.checkpoint.errors.StorageError: save: checkpoint /dev/null/first: Not a directory: /dev/null/first
    """


def listed(names: Sequence[str]) -> str:
    """Return the names as text for a message: all names if there are few, otherwise the first few.

    Example:
        >>> listed(["a", "b"])
        "'a', 'b'"
    """
    text = ", ".join(map(repr, names[:_NAMED]))
    return text if len(names) <= _NAMED else f"{text} and {len(names) - _NAMED} more"
