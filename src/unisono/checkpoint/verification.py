"""Verifies a checkpoint, and finds the newest or the last good checkpoint."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

from unisono.checkpoint.collective import CollectiveScope
from unisono.checkpoint.errors import CheckpointError
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.reader import Files, read_manifest, windows_of
from unisono.checkpoint.saver import Progress, progress_counter
from unisono.checkpoint.storage import Storage, storage_at

__all__ = ["complete", "last_good", "latest", "verify"]

_OFFERED = 3
_QUICKLY = 8 << 30


def verify(path: str | os.PathLike[str] | Storage, *, progress: Progress | None = None) -> Manifest:
    """Read every byte of a checkpoint, and compare the bytes with the saved digests.

    Args:
        path: A directory, a URL that fsspec supports, or a storage.
        progress: Called with the number of bytes read and the total.

    Returns:
        The manifest, with `tensors`, `files`, `ranks` and `nbytes`.

    Raises:
        CorruptError: The checkpoint is damaged. The error's `tensors` names all tensors affected by the damage; the
            message names the first few.
        NoCheckpointError, FormatError, StorageError: As for `load`.

    Cost: one pass over the files, at the speed of the disk.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> un.checkpoint.save(path, {"w": torch.zeros(3)})
        >>> un.checkpoint.verify(path).nbytes > 12
        True
    """
    storage = storage_at(path)
    manifest: Manifest = CollectiveScope(None, "verify", storage.where).first(partial(_verify, storage, progress))
    return manifest


def _verify(storage: Storage, progress: Progress | None) -> Manifest:
    manifest, _ = read_manifest(storage)
    manifest.check_sizes(storage.sizes())
    with Files(storage, manifest) as files:
        # The windows cover every file: `read_manifest` has checked that each byte belongs to a header or to a tensor's
        # block, and that each file has a tensor, whose windows include the file's header.
        files.check(windows_of(manifest, manifest.tensors), on_bytes=progress_counter(progress, manifest.nbytes))
    return manifest


def complete(directory: Storage) -> list[tuple[Storage, Manifest]]:
    """Return a directory's checkpoints that have an intact manifest and files of the recorded sizes, newest first."""
    found = list[tuple[Storage, Manifest]]()
    before = set[str]()
    names = set(directory.children())
    while names and not found:
        for name in names:
            with suppress(CheckpointError, OSError):
                manifest, _ = read_manifest(directory.child(name))
                manifest.check_sizes(directory.child(name).sizes())
                found.append((directory.child(name), manifest))
        if names == before:
            break
        if not found:
            # In the meantime, another process may have completed a checkpoint and removed all older ones.
            before = names
            names = set(directory.children())
    return sorted(found, key=lambda pair: (-pair[1].created_ns, pair[0].name))


def latest(directory: str | os.PathLike[str] | Storage) -> str | None:
    """Return the path of the newest complete checkpoint in a directory; None if there is none.

    Unfinished checkpoints, and checkpoints with missing or truncated files, are ignored. Digests are compared only by
    `load` and `verify`. The newest checkpoint is the one with the latest timestamp from the clock of rank 0's host;
    checkpoints of one `Checkpointer` remain in order even if that clock was set back.

    Args:
        directory: The parent of the checkpoints: a directory, a URL that fsspec supports, or a storage.

    Raises:
        OSError: The directory cannot be read. A missing directory counts as empty.

    Cost: reads the manifest of every checkpoint in the directory.

    Example:
        >>> import pathlib, tempfile
        >>> runs = pathlib.Path(tempfile.mkdtemp())
        >>> un.checkpoint.latest(runs)
        >>> for epoch in range(3):
        ...     un.checkpoint.save(runs / f"epoch-{epoch}", {"epoch": epoch})
        >>> pathlib.Path(un.checkpoint.latest(runs)).name
        'epoch-2'
    """
    found = complete(storage_at(directory))
    return found[0][0].where if found else None


def last_good(storage: Storage) -> str | None:
    """Return the path of the newest intact checkpoint beside `storage`, for messages; large ones aren't verified."""
    try:
        beside = [pair for pair in complete(storage.parent()) if pair[0].name != storage.name]
    except OSError:
        return None
    for other, manifest in beside[:_OFFERED]:
        if manifest.nbytes > _QUICKLY:
            return f"{other.where} (not verified)"
        with suppress(CheckpointError, OSError):
            _verify(other, None)
            return other.where
    return None
